"""Record a step that is like all later ones, in which caches are filled."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from sacplan.core.model_calls import ModelCall, shapes_of
from sacplan.core.program import Phase, Program
from sacplan.errors import SacplanWarning
from sacplan.record.fake_data import DataRules
from sacplan.record.host_state import stepped_on_host
from sacplan.record.largest_step import before_largest_step
from sacplan.record.recorder import Recorder
from sacplan.record.state import preserved_rng
from sacplan.record.step import Step, cached_tensors
from sacplan.record.user_code import plain_attributes
from sacplan.torch_compat.distributed_modules import first_steps
from sacplan.torch_compat.inductor import compiled_so_far, is_compiling_dry
from sacplan.torch_compat.ops import is_computation

_MOST_STEPS = 4
"""Most steps that are recorded until two in a row run the same ops."""


def record_settled_step(
    step: Step,
    recorder: Callable[[], Recorder],
    handle: Any = None,
    rules: DataRules | None = None,
) -> tuple[Program, tuple[ModelCall, ...], tuple[str, ...]]:
    """Record a step that is like all later ones; return its program, the model's calls and checkpointed modules.

    A step that changes nothing but parameters and gradients is such a step: it leaves no tensors behind and the model's
    attributes as they were. Else steps are recorded until two in a row run the same ops before the optimizer's, at most
    four times. With accumulation, or an optimizer that steps in the backward pass or changes layouts of parameters, one
    more is recorded: the first one makes the gradients, the state or the layouts that later ones find.
    """
    # Each round records one step. What it leaves behind (a cache that was filled) is alive from the start of the next.
    # The first exit is the usual one: nothing was left, so the next step would be the same.
    left: list[Any] = []
    buckets: list[Any] = []
    program: Program | None = None
    # A usual step begins with what later ones begin with: gradients, and the buffers of what runs on ranks.
    unusual = max(int(step.accumulates), first_steps(step.model))
    is_usual = not unusual
    for i in range(1, 1 + _MOST_STEPS + unusual + bool(step.stepped_inside)):
        # If a plan is applied, only the last recorded step's differences from it count.
        if handle is not None:
            handle.forget_differences()
        before, plain, with_state = program, plain_attributes(step.model), step.state_made_inside
        compiled = compiled_so_far() if is_compiling_dry() else None
        strides = [p.stride() for p in step.model.parameters()]
        recording = recorder()
        recording.storages.track_alive([*left, *buckets])
        # Steps write running statistics. If one of a single number is not known any more, it gets a value that the
        # model can ask for.
        if rules is not None:
            rules.assume_statistics(step.model)
        # The same random numbers in each round, so that a layer that is dropped is dropped again.
        with preserved_rng(), _recorded_inputs(step.model) as calls:
            program = _record(step, recording, rules)
        step.forget_gradients_of_batch()
        new = recording.storages.left_behind()
        if new:
            # Frees tensors that only reference cycles hold; the collector is off, so all are young.
            gc.collect(0)
            new = [ref for ref in new if ref() is not None]
        # A step may also find what steps before the last one have left.
        left = [*(ref for ref in left if ref() is not None), *new]
        # A step that makes layouts, or state in the backward pass, is not usual: the next one finds them.
        laid_out = strides == [p.stride() for p in step.model.parameters()]
        is_usual = is_usual and laid_out and step.state_made_inside == with_state
        is_usual = is_usual and (compiled is None or compiled == compiled_so_far())
        if is_usual and not new and plain_attributes(step.model) == plain:
            return program, tuple(calls), recording.checkpointed
        # Tensors are left at every step (a running average, say), but the ops have settled.
        if is_usual and before is not None and _ops_run(before) == _ops_run(program):
            return program, tuple(calls), recording.checkpointed
        is_usual = i >= unusual
        # As it was before the first step: gradients of this one must not be alive when the next begins, unless the next
        # is to add to them.
        if not step.accumulates:
            step.model.zero_grad(set_to_none=True)
            buckets += recording.storages.gradients_left()
    assert program is not None
    warnings.warn(
        f"each of {_MOST_STEPS} steps ran other ops than the one before; the profile is of the last. A plan is "
        "applied to what a step has in common with it, see Handle.differences.",
        SacplanWarning,
        stacklevel=4,
    )
    return program, tuple(calls), recording.checkpointed


def _ops_run(program: Program) -> list[tuple[str, int]]:
    # Views are left out, as they make no values. Backward ops count: they include those of communication hooks, which
    # may run other ops after some steps, and keep what these need.
    before = (op for op in program.ops if op.phase != Phase.OPTIMIZER)
    return [(op.name, op.scope) for op in before if is_computation(op.name)]


def _record(step: Step, recorder: Recorder, rules: DataRules | None = None) -> Program:
    optimizer = step.stepped_last

    def make_state() -> None:
        """Have the optimizer make its state, which the recorded step then finds, as later steps do."""
        assert optimizer is not None
        # Of floats, only single ones are followed: the count of steps, and no moments.
        with recorder.paused(), rules.few_floats() if rules is not None else contextlib.nullcontext():
            before_largest_step(optimizer, (lambda number: number) if rules is None else rules.value)
        recorder.training.track_optimizer(optimizer, initial=True)
        recorder.track_model(
            step.model
        )  # its first step may lay parameters out anew, and so replace their memory

    recorder.training.stepped_on_host = stepped_on_host(optimizer)  # before they are tracked
    # The first name that a storage gets stays: parameters before the batch, and the batch before caches.
    recorder.track_model(step.model)
    recorder.track_tensors(t for t in tree_leaves(step.batch) if isinstance(t, torch.Tensor))
    recorder.track_tensors(cached_tensors(step.model))
    for stepping in step.stepped_inside:
        recorder.training.track_optimizer(stepping, initial=True)
    try:
        with recorder:
            output = step.run(make_state)
        del output  # alive until the step is over
        return recorder.program()
    finally:
        recorder.forget()  # a graph that the model keeps holds the recorder's hooks: a cycle that is never collected


@contextlib.contextmanager
def _recorded_inputs(model: torch.nn.Module) -> Iterator[Collection[ModelCall]]:
    """Collect the calls of a model inside: each different one once."""
    calls: dict[ModelCall, None] = {}

    def note(_: torch.nn.Module, args: Any, kwargs: Any) -> None:
        has_gradients = any(p.grad is not None for p in model.parameters())
        calls[ModelCall(shapes_of(args, kwargs), has_gradients)] = None

    # TorchScript compiles hooks, and cannot compile this one, so its calls are not noted.
    if isinstance(model, torch.jit.ScriptModule):
        yield calls
        return
    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()
