"""Other people's ways to trade memory for recomputation, applied and measured with other people's tools.

Each rival changes a model, then one training step of it (no optimizer, outputs freed) runs on fake tensors with
the kernels of an H100. The peak is that of torch's ``MemTracker`` (storages without the allocator's rounding and
without what a kernel allocates inside), the FLOPs are those of torch's ``FlopCounterMode``. sacplan's own plans
are measured here in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import sacplan
from benchmarks.harness.steps import tensors_of
from sacplan.device.cost import CostModel
from sacplan.device.devices import resolve_device
from sacplan.device.kernels import active_device
from sacplan.device.op_kernels import Call
from sacplan.device.overrides import override
from sacplan.record.fake_copy import FakeCopier
from sacplan.record.step import default_loss

DEVICE = "h100"
COMPILE_BUDGETS = (0.7, 0.5, 0.4, 0.3, 0.2, 0.1)
PROTOTYPE_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)

Prepare = Callable[[nn.Module], Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a batch.

    Attributes:
        name: short, for the command line.
        title: for the picture.
        make_model: called under the meta device.
        make_batch: called inside ``sacplan.fake_device``, or outside for a real one.
        layers: the list of layers, by name.
    """

    name: str
    title: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Any]
    layers: str


@dataclass(frozen=True, slots=True)
class Point:
    """One measured step: whose it is, its setting and peak, and the FLOPs of the whole step."""

    who: str
    setting: str
    peak_bytes: int
    flops: int


class NotApplicable(Exception):
    """A rival does not work on this model."""


# --- measuring --------------------------------------------------------------------------------------------


def measure(case: Case, who: str, setting: str, prepare: Prepare = lambda model: None) -> Point:
    """Run and measure a fake step after ``prepare`` has changed the model."""
    with sacplan.fake_device(DEVICE):
        model, batch = _fake(case)
        prepare(model)
        return _measured_step(model, batch, lambda: default_loss(model, batch).backward(), who, setting)


def meta_model(case: Case) -> nn.Module:
    """Build the model on the meta device, in training mode."""
    with torch.device("meta"):
        return case.make_model().train()


def _fake(case: Case) -> tuple[nn.Module, Any]:
    """Return the model and the batch on fake CPU tensors.

    The model is copied from one on meta, for some models look at the values of new weights, which fake ones do not
    have.
    """
    return FakeCopier().model(meta_model(case)), case.make_batch()


def _measured_step(model: nn.Module, batch: Any, step: Callable[[], None], who: str, setting: str) -> Point:
    tracker = MemTracker()
    tracker.track_external(model, *tensors_of(batch))
    with tracker:
        step()
    (peak,) = tracker.get_tracker_snapshot("peak").values()
    model.zero_grad(set_to_none=True)
    with FlopCounterMode(display=False) as counter:
        step()
    return Point(who, setting, peak["Total"], counter.get_total_flops())


def unplanned(case: Case) -> Point:
    """Measure the plain step."""
    return measure(case, "unplanned", "")


def planned(case: Case, plan: sacplan.Plan, setting: str) -> Point:
    """Measure the step with a plan of sacplan."""
    return measure(case, "sacplan", setting, lambda model: sacplan.apply(model, plan))


# --- torch.utils.checkpoint -------------------------------------------------------------------------------


def _checkpointed(module: nn.Module, **options: Any) -> None:
    module.forward = functools.partial(  # type: ignore[method-assign]
        checkpoint, module.forward, use_reentrant=False, **options
    )


def checkpoint_layers(layers: Sequence[nn.Module], every_second: bool | None = None) -> None:
    """Put layers in torch's checkpoint; with ``every_second`` in its selective contexts.

    Those keep attention and matmuls, or attention and every second matmul.
    """

    def contexts() -> Any:
        seen = {False: 0, True: 0}  # of this call of a layer, in the forward pass and when it is repeated

        def keep(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if getattr(func, "_overloadpacket", None) not in flop_registry:
                return CheckpointPolicy.PREFER_RECOMPUTE
            if "attention" in str(func):
                return CheckpointPolicy.MUST_SAVE
            seen[ctx.is_recompute] += 1
            skip = every_second and seen[ctx.is_recompute] % 2 == 0
            return CheckpointPolicy.PREFER_RECOMPUTE if skip else CheckpointPolicy.MUST_SAVE

        return create_selective_checkpoint_contexts(keep)

    for layer in layers:
        _checkpointed(layer, **({} if every_second is None else {"context_fn": contexts}))


def checkpoint_every(case: Case, k: int) -> Point:
    """Put layers k, 2k, ... in torch's checkpoint; ``k=1`` is full checkpointing."""

    def prepare(model: nn.Module) -> None:
        checkpoint_layers(list(model.get_submodule(case.layers).children())[k - 1 :: k])

    return measure(case, "checkpoint", "every layer" if k == 1 else f"every {k} layers", prepare)


def checkpoint_by_op(case: Case, *, every_second: bool) -> Point:
    """Put torch's selective contexts in every layer: keep attention and matmuls, or every second matmul."""

    def prepare(model: nn.Module) -> None:
        checkpoint_layers(list(model.get_submodule(case.layers).children()), every_second)

    return measure(case, "by op", "every second matmul" if every_second else "all matmuls", prepare)


# --- torch.compile's activation_memory_budget -------------------------------------------------------------


class _RoutedFunctions(TorchFunctionMode):
    """Choose the device's kernels while a graph is traced.

    Its tensors are wrapped then. So the choice is made one level above, where functions are called.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            attention = override[torch.ops.aten.scaled_dot_product_attention.default]
            return attention(active_device(), *args, **(kwargs or {}))
        if func is F.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return override[torch.ops.aten.dropout.default](active_device(), input, p, training)


def _run_as_it_is(graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """Compile a graph by interpreting it, and free everything after its last use, its inputs too."""

    def run(arguments: list[Any]) -> Any:
        # A new interpreter each time: it holds on to the outputs of its last run.
        return torch.fx.Interpreter(graph).boxed_run(arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def compiled(case: Case, budget: float) -> Point:
    """Run the step as AOTAutograd's min-cut partitioner cuts it for a memory budget (its default solver, ``dp``).

    Dynamo and Inductor are left out: what is saved and what is recomputed is decided between them. The graphs run
    op by op, so temporaries count that Inductor may fuse away.

    Args:
        case: the model; its loss is compiled with it.
        budget: ``torch._functorch.config.activation_memory_budget``; 1 is what it does without one.
    """
    with sacplan.fake_device(DEVICE), functorch_config.patch(activation_memory_budget=budget):
        model, batch = _fake(case)
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}

        def call(named: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
            # Ties are kept.
            with nn.utils.stateless._reparametrize_module(model, named, tie_weights=True):
                return default_loss(model, batch)

        graph = aot_function(
            call,
            fw_compiler=_run_as_it_is,
            bw_compiler=_run_as_it_is,
            partition_fn=min_cut_rematerialization_partition,
            num_params_buffers=len(named),
        )

        def step() -> None:
            graph(named, batch).backward()

        with _RoutedFunctions():
            step()  # traces and cuts
        model.zero_grad(set_to_none=True)
        return _measured_step(model, batch, step, "compile", f"{budget:g}")


# --- the prototype, torch.distributed._tools --------------------------------------------------------------


def prototype(case: Case) -> list[Point]:
    """Run the plans of PyTorch's prototype (PR #137908) at shares of its own predicted peak, applied as it says.

    Per module that it checkpoints, its ``get_optimal_checkpointing_policy_per_module`` gives the ops to save, and
    they become a selective context of torch's checkpoint. Its roofline refuses to run without CUDA, so op times
    are those of sacplan's cost model. Budgets for which it finds no plan are left out.

    Raises:
        NotApplicable: its own code refuses the model.
    """
    from torch.distributed._tools import ilp_utils, sac_ilp
    from torch.distributed._tools.sac_estimator import SACEstimator

    np.random.seed(0)  # its fit of the trade-off curves draws from there
    logging.getLogger(sac_ilp.__name__).setLevel(logging.CRITICAL)  # it warns about its own statistics
    quiet = contextlib.redirect_stdout(io.StringIO())
    with sacplan.fake_device(DEVICE), _prototype_times(), quiet:
        info, estimator = _prototype_statistics(*_fake(case), SACEstimator())
    try:
        graph = ilp_utils.parse_module_info(info)
    except AssertionError as error:  # without a word
        raise NotApplicable(
            f"its parse_module_info refuses this model: it ran {len(info['mod_order']['fw_pre_order'])} modules and "
            f"has statistics of {len(info['mod_stats'])}"
        ) from error
    predicted, _ = ilp_utils.get_peak_memory_runtime_baseline(graph)
    points = []
    for share in PROTOTYPE_SHARES:
        decisions, _, _ = sac_ilp.sac_milp(graph, memory_budget=share * predicted / 2**30)
        if decisions:
            policies = {
                fqn: sac_ilp.get_optimal_checkpointing_policy_per_module(
                    estimator.sac_mod_stats[fqn], 1 - ratio
                )
                for fqn, ratio in decisions.items()
            }
            prepare = functools.partial(_apply_prototype, policies, estimator)
            points.append(measure(case, "prototype", f"{share:.0%}", prepare))
    return points


@contextlib.contextmanager
def _prototype_times() -> Iterator[None]:
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    costs = CostModel(resolve_device(DEVICE))

    def estimate(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
        out = func(*args, **(kwargs or {}))
        return out, costs.cost(Call(func, args, kwargs or {}, out))[1]

    with mock.patch.object(RuntimeEstimator, "_roofline_estimate", estimate):
        yield


def prototype_traced(
    model: nn.Module, step: Callable[[], Any], estimator: Any, forward: Callable[[], Any]
) -> tuple[Any, Any]:
    """Run what the prototype traces as its example drives it; return what tracks memory, and what sums up times."""
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    tracker, runtime = MemTracker(), RuntimeEstimator()
    tracker.track_external(model)
    with tracker:
        step()
    with runtime(estimate_mode_type="operator-level-cost-model"):
        step()
    with estimator(estimate_mode_type="operator-level-cost-model"):
        forward()
    return tracker, runtime


def _prototype_statistics(model: nn.Module, batch: Any, estimator: Any) -> tuple[Any, Any]:
    from torch.distributed._tools.ilp_utils import aggregate_stats

    def step() -> None:
        default_loss(model, batch).backward()
        model.zero_grad(set_to_none=True)

    tracker, runtime = prototype_traced(model, step, estimator, lambda: default_loss(model, batch))
    # It divides by what the ops of a module take. A module that takes nothing is a leaf to it then: no choice.
    for fqn in [fqn for fqn, stats in estimator.sac_mod_stats.items() if not sum(stats.memory)]:
        del estimator.sac_mod_stats[fqn], estimator.sac_mod_greedy_order_meta[fqn]
    try:
        return aggregate_stats(model, tracker, runtime, estimator, torch.device("cpu")), estimator
    except KeyError as error:
        raise NotApplicable(
            f"its aggregate_stats refuses this model: a module has no statistics of {error}, as one without "
            "parameters that no gradient passes through"
        ) from error


def _apply_prototype(policies: dict[str, list[int]], estimator: Any, model: nn.Module) -> None:
    from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP

    def contexts(fqn: str) -> Any:
        saved, names = policies[fqn], estimator.sac_mod_stats[fqn].func_names
        seen = {False: 0, True: 0}

        def keep(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if func in OPS_TO_ALWAYS_SKIP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            at = seen[ctx.is_recompute]
            seen[ctx.is_recompute] += 1
            if names[at] != func._overloadpacket.__name__:
                raise RuntimeError(f"op {at} of {fqn} is {func}, the prototype saw {names[at]}")
            return CheckpointPolicy.MUST_SAVE if saved[at] else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep)

    for fqn in policies:  # they begin with the name of the model's class
        _checkpointed(model.get_submodule(fqn.partition(".")[2]), context_fn=functools.partial(contexts, fqn))
