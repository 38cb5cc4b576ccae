"""A compiled step is predicted by a dry run of the compiler. The allocator's events are the truth."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch

import sacplan
from sacplan.errors import TraceError
from sacplan.record.step import Step
from sacplan.running.measure import measured_step
from tests.support.steps import bit_equal, grads_of
from tests.zoo.language_models import LM, cross_entropy, tokens
from tests.zoo.layers import FromFunction

EAGERLY = {"backend": "aot_eager"}
WHOLE: dict[str, Any] = {"modules": [""], **EAGERLY}
BLOCKS: dict[str, Any] = {"modules": ["layers.*"], **EAGERLY}
BATCH = tokens(4, 64)


@functools.cache
def model() -> LM:
    torch.manual_seed(0)
    return LM(layers=2, dim=64, heads=2, dropout=0.1)


@functools.cache
def profile_of(blocks: bool) -> sacplan.Profile:
    return sacplan.profile(model(), BATCH, cross_entropy, device="cpu", compile=BLOCKS if blocks else WHOLE)


def compiled_copy(compile: dict[str, Any]) -> LM:
    found = copy.deepcopy(model())
    how = {name: value for name, value in compile.items() if name != "modules"}
    for module in [found] if compile["modules"] == [""] else found.layers:
        module.compile(**how)
    return found


def measured_peak(compile: dict[str, Any], optimizer: Any = None) -> int:
    torch.compiler.reset()
    return measured_peak_of(compiled_copy(compile), optimizer)


def measured_peak_of(found: LM, optimizer: Any = None) -> int:
    stepping = None if optimizer is None else optimizer(found.parameters())
    step = Step(found, BATCH, cross_entropy, stepping)
    for _ in range(2):
        step.accumulate()
        found.zero_grad(set_to_none=True)
    return measured_step(step, BATCH).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [False, True])
def test_the_peak_of_a_compiled_step_is_what_its_allocator_sees(blocks: bool) -> None:
    assert profile_of(blocks).peak_bytes == pytest.approx(
        measured_peak(BLOCKS if blocks else WHOLE), rel=0.005
    )


@pytest.mark.slow
@pytest.mark.parametrize("modules", [["layers.*"], [""]])
def test_the_peak_with_inductor_and_an_optimizer_is_what_its_allocator_sees(modules: list[str]) -> None:
    how = {"modules": modules, "backend": "inductor"}
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    found = sacplan.profile(model(), BATCH, cross_entropy, adamw, device="cpu", compile=how)
    assert any(op.name.startswith("inductor.cpp_fused") for op in found.program.ops)
    assert found.peak_bytes == measured_peak(how, adamw)


@pytest.mark.slow
def test_blocks_of_other_sizes_are_compiled_with_symbols_for_sizes() -> None:
    def block(width: int) -> FromFunction:
        run = lambda self, x: self.norm(self.conv(x)).relu()  # noqa: E731
        return FromFunction(
            run, conv=torch.nn.Conv2d(width, 2 * width, 3, 2), norm=torch.nn.BatchNorm2d(2 * width)
        )

    blocks, x = torch.nn.Sequential(block(4), block(8)), torch.randn(4, 4, 32, 32)
    how = {"modules": ["?"], **EAGERLY}
    plan = sacplan.plan(sacplan.profile(blocks, x, device="cpu", compile=how), "100%")
    real = sacplan.verify(blocks, x, plan, run="real")
    assert real.peak_bytes == plan.peak_bytes


@pytest.mark.slow
def test_a_model_that_is_compiled_already_is_profiled_as_it_is_compiled() -> None:
    in_place = compiled_copy(BLOCKS)
    found = sacplan.profile(in_place, BATCH, cross_entropy, device="cpu")
    assert found.peak_bytes == profile_of(True).peak_bytes
    assert found.fingerprint.setup.compiled == profile_of(True).fingerprint.setup.compiled
    wrapped: Any = torch.compile(copy.deepcopy(model()), backend="aot_eager")
    assert sacplan.profile(wrapped, BATCH, cross_entropy, device="cpu").program == profile_of(False).program


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_blocks_that_torch_compile_returned_are_profiled_and_planned_as_they_are_compiled(
    backend: str,
) -> None:
    torch.compiler.reset()
    found = copy.deepcopy(model())
    for name, layer in found.layers.named_children():  # as torchtitan did
        found.layers.register_module(name, torch.compile(layer, backend=backend))  # type: ignore[arg-type]
    names = found.state_dict().keys()
    profile = sacplan.profile(found, BATCH, cross_entropy, device="cpu")
    asked = {"modules": ["layers.*._orig_mod"], "backend": backend}
    plain = sacplan.profile(model(), BATCH, cross_entropy, device="cpu", compile=asked)
    assert (profile.program, profile.fingerprint) == (plain.program, plain.fingerprint)
    assert measured_peak_of(found) == profile.peak_bytes
    plan = sacplan.policy("full", profile=profile)
    assert sacplan.verify(found, BATCH, plan, cross_entropy, run="real").peak_bytes == plan.peak_bytes
    with sacplan.apply(found, plan) as handle:
        assert handle.units == ("layers.0", "layers.1")
        assert measured_peak_of(found) == plan.peak_bytes < profile.peak_bytes
    assert measured_peak_of(found) == profile.peak_bytes
    assert found.state_dict().keys() == names


def test_compile_false_records_the_step_uncompiled() -> None:
    found = sacplan.profile(compiled_copy(WHOLE), BATCH, cross_entropy, device="cpu", compile=False)
    assert found.program == sacplan.profile(model(), BATCH, cross_entropy, device="cpu").program
    assert found.peak_bytes != profile_of(False).peak_bytes


def test_a_dry_run_leaves_the_model_as_it_was() -> None:
    found = copy.deepcopy(model())
    before = grads_of(found, BATCH, cross_entropy)
    sacplan.profile(found, BATCH, cross_entropy, device="cpu", compile=WHOLE)
    assert found._compiled_call_impl is None
    assert bit_equal(before, grads_of(found, BATCH, cross_entropy))


@pytest.mark.parametrize(
    ("compile", "says"),
    [
        ({"backend": "cudagraphs"}, "backend 'cudagraphs'"),
        (["blocks.*"], r"compile: no module matches 'blocks\.\*'"),
        ({"backends": "inductor"}, "'backends'; known are modules, backend"),
    ],
)
def test_what_cannot_be_compiled_so_is_said(compile: Any, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        sacplan.profile(model(), BATCH, cross_entropy, device="cpu", compile=compile)


def test_hooks_that_a_model_registers_as_it_runs_stay() -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def listen(self: FromFunction) -> None:
        if not self.listens:
            self.listens = True
            self.inner.register_forward_hook(lambda module, args, output: self.seen.append(output))

    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        listen(self)
        self.seen = []
        return self.inner(x).sum() + self.seen[0].square().sum()

    found = FromFunction(forward, inner=torch.nn.Linear(64, 64))
    found.listens = False
    profile = sacplan.profile(found, torch.randn(256, 64), device="cpu", compile=WHOLE)
    assert profile.peak_bytes > 2 * 4 * 256 * 64


def test_numbers_in_the_code_are_constants_of_the_graphs() -> None:
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * torch.tensor([0.5, 2.0])).exp().sum()

    found = FromFunction(forward, inner=torch.nn.Linear(8, 2))
    assert sacplan.profile(found, torch.randn(16, 8), device="cpu", compile=WHOLE).peak_bytes


def test_a_step_of_which_nothing_is_compiled_is_an_error() -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self: FromFunction, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).sum()

    left_alone = FromFunction(forward, head=torch.nn.Linear(4, 4))
    with pytest.raises(TraceError, match="compiled nothing"):
        sacplan.profile(left_alone, torch.zeros(2, 4), device="cpu", compile=WHOLE)


@pytest.mark.slow
def test_a_compiled_step_of_a_gpu_that_is_not_there_is_recorded_and_its_random_ops_run_again() -> None:
    in_bfloat16 = copy.deepcopy(model()).to(torch.bfloat16)
    found = sacplan.profile(in_bfloat16, BATCH, cross_entropy, device="h100", compile=["layers.*"])
    names = {op.name for op in found.program.ops}
    assert any(name.startswith("inductor.triton_") for name in names)
    assert "aten._scaled_dot_product_flash_attention.default" in names
    full = sacplan.policy("full", profile=found, layers="layers.*")
    assert full.peak_bytes < found.peak_bytes
    assert full.recompute_flops > 0


def test_kernels_of_a_gpu_are_found_after_a_compiled_step_of_a_cpu() -> None:
    profile_of(False)
    in_bfloat16 = copy.deepcopy(model()).to(torch.bfloat16)
    found = sacplan.profile(in_bfloat16, BATCH, cross_entropy, device="h100", compile=WHOLE)
    assert "aten._scaled_dot_product_flash_attention.default" in {op.name for op in found.program.ops}
