"""A published step: its model on the meta device, the figures that it is compared with, and what is known of it.

A step says which of the published figures it compares with, how the training loop around it holds tensors, and what is
not known of the setting or missing in the prediction.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import sacplan
from benchmarks.harness.mixed_plans import plan_with
from benchmarks.harness.played import Loop
from benchmarks.harness.steps import LossFn
from benchmarks.models.cases import Case
from sacplan.core.decisions import Offload, SeenTensor, Site
from sacplan.core.program import StorageKind
from sacplan.device.devices import DeviceSpec, resolve_device
from sacplan.techniques.offload.sites import place_of, sites_of, weight_of, weights_asked_for

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
"""Parameters in float32, computing in bfloat16 and reducing in float32."""

Figure = Literal["allocated", "active", "reserved", "reserved_expandable", "end"]
Kind = Literal["known", "assumed", "compiled"]
GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One published figure, and the predicted one beside it.

    Attributes:
        part: where it stands in ``measured`` of the row: keys and positions; ``()`` for the value itself.
        unit: bytes of one.
        minus: what the published figure counts besides, in its unit.
        figure: what was measured. Active blocks are allocated ones, and those that another stream may still read.
        first: after the first step; by default after as many as it takes until nothing changes.
        loop: the loop of this figure, if it differs from that of the step.
        build: makes the model of this figure, if it differs from that of the step.
    """

    part: tuple[str | int, ...] = ()
    unit: float = 1
    minus: float = 0
    figure: Figure = "allocated"
    first: bool = False
    loop: Loop | None = None
    build: Callable[[], Case] | None = None

    def published_bytes(self, measured: Any) -> float:
        """Return the published figure in bytes."""
        for key in self.part:
            measured = measured[key]
        return float((measured - self.minus) * self.unit)

    @property
    def predicted_figure(self) -> str:
        """The attribute of ``StepFigures`` that is compared."""
        return "allocated" if self.figure == "active" else self.figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A published step.

    Attributes:
        build: makes the model, on the meta device.
        points: the figures that are compared.
        device: the GPU, for times and for the size of workspaces.
        workspace_bytes: of cuBLAS in PyTorch of that time, without those of cuBLASLt; None: as today.
        plan: the checkpointing of the step; None: none.
        loop: the training loop.
        fsdp: how it is spread over ranks; None: one GPU, or ``spread``.
        spread: spreads the model over ``ranks`` with PyTorch's calls, and the step is recorded as a rank runs it.
        around: the context of the step on a rank, entered when the model is spread.
        compiled: what of it is compiled, as for ``sacplan.profile``; None: nothing.
        samples: tokens or images of one step on one GPU, of which the row gives the number per second.
        mode: as for ``sacplan.profile``.
        accumulation: passes over a part of the samples before the optimizer steps; the step is recorded with one.
        one_stream: whether copies of offloading run on the stream of computation, which hides none of them.
        adds_gradients: whether the loop sets gradients to zero and adds to them, as ``zero_grad`` did before torch 2.0.
        pageable_bytes: copied to the GPU in each step of a loop that waits for the GPU between steps; 0: it does not.
        asks: values that its loop asks the GPU for one after the other, beside the model.
        tf32: whether float32 matrix products may run as TF32. Convolutions may by default.
        group: the class of steps that its time belongs to, in the table of times; empty: none.
        assumed: whether what is not known decides the figure.
        missing: what the step had that the prediction has not.
    """

    build: Callable[[], Case]
    device: str | DeviceSpec
    points: tuple[Point, ...] = ()
    workspace_bytes: int | None = None
    plan: Callable[[sacplan.Profile], sacplan.Plan] | None = None
    loop: Loop = dataclasses.field(default_factory=Loop)
    fsdp: sacplan.FSDP2 | None = None
    spread: Callable[[Any], None] | None = None
    ranks: int = 1
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    compiled: Any = None
    samples: int = 0
    mode: Literal["train", "inference"] = "train"
    accumulation: int = 1
    one_stream: bool = False
    adds_gradients: bool = False
    pageable_bytes: int = 0
    asks: int = 0
    tf32: bool = False
    group: str = ""
    assumed: bool = False
    missing: str = ""

    @property
    def kind(self) -> Kind:
        """How much of the step is known and predicted."""
        return "compiled" if self.missing or self.compiled else "assumed" if self.assumed else "known"

    def profile(self) -> sacplan.Profile:
        """Record the step without its plan."""
        return dataclasses.replace(self, plan=None).recorded()[0]

    def recorded(self) -> tuple[sacplan.Profile, sacplan.Plan | None]:
        """Return the recorded step and its plan; a compiled step runs with it, and there is None left."""
        spec = resolve_device(self.device)
        if self.workspace_bytes is not None:
            spec = dataclasses.replace(spec, matmul_workspace_bytes=self.workspace_bytes)
        options: dict[str, Any] = {"compile": self.compiled, "mode": self.mode}
        if self.adds_gradients:
            options["accumulation_steps"] = 2
        built = self.build()
        with ExitStack() as stack:
            if self.tf32:
                stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
                torch.set_float32_matmul_precision("high")
            if self.spread is not None:
                stack.enter_context(sacplan.ranks(self.ranks, device=spec))
                self.spread(built.model)
                stack.enter_context(self.around())
            else:
                options["device"] = spec
            if self.fsdp is not None:
                options["ranks"] = self.fsdp
            profile = sacplan.profile(built.model, built.batch, built.loss_fn, built.optimizer, **options)
            plan = None if self.plan is None else self.plan(profile)
            if plan is not None and profile.runs_compiled:
                return profile.run_with(plan), None
        return profile, plan


def empty(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
    """Return a tensor on the meta device, of integers by default."""
    return torch.empty(shape, dtype=dtype, device="meta")


def single_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=False)


def foreach_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, foreach=True)


def step_in_backward(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer]) -> None:
    """Register hooks that step an optimizer for each parameter, as PyTorch's tutorial and torchtune do."""
    optimizers = {p: make([p]) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross-entropy of images and their labels."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def in_autocast(run: LossFn, dtype: torch.dtype = torch.bfloat16) -> LossFn:
    """Compute a loss under autocast."""

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cuda", dtype):
            return run(model, batch)

    return loss_fn


COMPILE = "torch.compile"
LAYERS = "layers.*"
_STASH = 5
"""torchtune's ``max_fwd_stash_size``."""


def op_policy(profile: sacplan.Profile) -> sacplan.Plan:
    """Return torchtitan's selective checkpointing: in each layer, every second product is kept."""
    return sacplan.policy("selective", "op", profile=profile, layers=LAYERS)


def full_policy(profile: sacplan.Profile, layers: str = LAYERS) -> sacplan.Plan:
    """Return the checkpointing of whole layers."""
    return sacplan.policy("full", profile=profile, layers=layers)


blocks_policy = functools.partial(full_policy, layers="blocks.*")


def offloading_policy(
    profile: sacplan.Profile, layers: str = LAYERS, stash: int = _STASH, ahead: int = 1
) -> sacplan.Plan:
    """Return torchtune's activation offloading on top of it: the inputs of layers wait on the host.

    As torchtune does it with streams (``OffloadActivations``): the copy of an input begins when its layer does, up to
    five inputs stay on the device until theirs are over, and a layer's input is called back one layer ahead.
    """
    plan, program = full_policy(profile, layers), profile.program
    units = sorted((unit for unit in plan.units if unit), key=lambda unit: int(unit.rpartition(".")[2]))
    decisions = []
    for i, unit in enumerate(units):
        sites = sites_of(program, unit)
        first = next(iter(sites))
        # The layer's input is what its first op reads and no parameter.
        (storage,) = (
            s for s in program.ops[first].reads if program.storage_kinds[s] != StorageKind.PARAMETER
        )
        # With a stash of none, a layer's input leaves when the layer is over.
        is_last = not stash or i + stash >= len(units)
        later = units[min(i + stash, len(units) - 1)]
        _, at = list(sites_of(program, later).items())[-1 if is_last else 0]
        before = units[min(i + ahead, len(units) - 1)]
        asked = next(iter(weights_asked_for(program, before).values()))
        decisions.append(
            Offload(
                unit, *sites[first], tensor=place_of(program, first, storage), let_go=Site(later, *at),
                fetch=SeenTensor(before, *sites_of(program, before)[asked], weight_of(program, asked)),
            )
        )  # fmt: skip
    return plan_with(profile, (*plan.decisions, *decisions))
