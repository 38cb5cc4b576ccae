"""The step as a trace for Perfetto or chrome://tracing.

The format is the "Trace Event Format":
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sacplan.core.names import short_op, shown_module
from sacplan.core.program import ROOT_SCOPE, Phase, Program
from sacplan.device.devices import DeviceSpec
from sacplan.profiling.profile import Profile
from sacplan.report.palette import STACK
from sacplan.report.timeline import Timeline, timeline_of
from sacplan.techniques.offload.rewrite import TO_HOST
from sacplan.techniques.offload.timing import clocked

_PROCESS = 1
_MODULES, _OPS, _AGAIN, _OUT, _BACK = 1, 2, 3, 4, 5
_THREADS = {_MODULES: "modules", _OPS: "ops", _AGAIN: "recomputed ops"}
_LINKS = {_OUT: "copies to the host", _BACK: "copies to the device"}
_AGAIN_COLOUR = "terrible"  # the name that chrome://tracing has for a strong red


def trace_of(profile: Profile, program: Program, budget_bytes: int | None) -> dict[str, Any]:
    """Return the trace of a step, with a plan or without: what ``Report.write_memory_trace`` writes."""
    model, timeline = profile.fingerprint.model_class, timeline_of(program)
    return {
        "traceEvents": [*_names(profile, program), *_op_slices(program, timeline, model),
                        *_module_slices(program, timeline, model),
                        *_copy_slices(program, profile.spec, model),
                        *_counters(timeline)],
        "displayTimeUnit": "ms",
        "otherData": {
            "model": model,
            "device": profile.device,
            "peak_bytes": timeline.peak_bytes,
            "budget_bytes": budget_bytes,
        },
    }  # fmt: skip


def _names(profile: Profile, program: Program) -> Iterator[dict[str, Any]]:
    title = f"{profile.fingerprint.model_class} on {profile.device}, predicted"
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": title}}
    for tid, name in (_THREADS | _LINKS if program.on_host else _THREADS).items():
        yield {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": tid, "args": {"name": name}}
        order = {"sort_index": tid}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PROCESS, "tid": tid, "args": order}


def _stamps(timeline: Timeline) -> list[float]:
    """Return the starts of the ops and the end of the last one, in µs.

    They are rounded here, so that adjacent slices still touch.
    """
    return [round(ms * 1e3, 3) for ms in (*timeline.start_ms.tolist(), timeline.end_ms)]


def _op_slices(program: Program, timeline: Timeline, model: str) -> Iterator[dict[str, Any]]:
    stamps = _stamps(timeline)
    for i, (index, again) in enumerate(zip(timeline.ops.tolist(), timeline.recomputed.tolist(), strict=True)):
        op = program.ops[index]
        event: dict[str, Any] = {
            "ph": "X",
            "name": short_op(op.name),
            "cat": Phase(int(timeline.phases[i])).name.lower() + (",recomputed" if again else ""),
            "pid": _PROCESS,
            "tid": _AGAIN if again else _OPS,
            "ts": stamps[i],
            "dur": round(stamps[i + 1] - stamps[i], 3),
            "args": {
                "op": op.name,
                "module": shown_module(program, index, model),
                "alive_bytes": int(timeline.live_bytes[i]),
            },
        }
        # A recomputed op has a thread of its own, and says for whom it runs.
        if again:
            event["cname"] = _AGAIN_COLOUR
            event["args"]["for"] = shown_module(program, int(timeline.during[i]), model)
        yield event


def _copy_slices(program: Program, spec: DeviceSpec, model: str) -> Iterator[dict[str, Any]]:
    """Yield the copies over the link, from when to when they take it."""
    found = clocked(program.ops.__getitem__, program.events, program.storage_bytes.__getitem__, spec)
    for copy in found.copies:
        op = program.ops[copy.op]
        out = op.name == TO_HOST
        yield {
            "ph": "X",
            "name": short_op(op.name),
            "cat": op.phase.name.lower(),
            "pid": _PROCESS,
            "tid": _OUT if out else _BACK,
            "ts": round(copy.begin_ms * 1e3, 3),
            "dur": round((copy.end_ms - copy.begin_ms) * 1e3, 3),
            "args": {
                "module": shown_module(program, copy.op, model),
                "bytes": program.storage_bytes[op.reads[0] if out else op.writes[0]],
            },
        }


def _module_slices(program: Program, timeline: Timeline, model: str) -> Iterator[dict[str, Any]]:
    """Yield nested begin and end events of phases, and of the module calls whose ops run."""
    stamps = _stamps(timeline)
    common = {"pid": _PROCESS, "tid": _MODULES}
    stack: list[tuple[str, int]] = []
    for i, op in enumerate(timeline.during.tolist()):
        phase = Phase(int(timeline.phases[i])).name.lower()
        path = [(phase, ROOT_SCOPE), *((phase, scope) for scope in _scopes(program, op))]
        # The stack of open calls and that of this op share a beginning. What is no longer open ends,
        # innermost first; then what is new begins.
        same = 0
        while same < min(len(stack), len(path)) and stack[same] == path[same]:
            same += 1
        while len(stack) > same:
            stack.pop()
            yield {"ph": "E", **common, "ts": stamps[i]}
        for part in path[same:]:
            scope = part[1]
            name = phase if scope == ROOT_SCOPE else program.scopes[scope].fqn or model
            stack.append(part)
            yield {"ph": "B", "name": name, "cat": phase, **common, "ts": stamps[i]}
    # What is still open ends with the last op.
    for _ in stack:
        yield {"ph": "E", **common, "ts": stamps[-1]}


def _scopes(program: Program, op: int) -> list[int]:
    """Return the module calls that an op is in, outermost first."""
    scope = program.ops[op].scope
    return [] if scope == ROOT_SCOPE else [scope, *program.ancestors(scope)][::-1]


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    # A kind that is never alive would be a band of height 0.
    kinds = [kind for kind in STACK if timeline.kind_bytes[:, kind].any()]
    rows = timeline.kind_bytes[:, kinds].tolist()
    names = [STACK[kind] for kind in kinds]
    # There is one stamp more than rows: the end, at which the counter keeps its last value.
    for stamp, row in zip(_stamps(timeline), rows, strict=False):
        values = dict(zip(names, row, strict=True))
        yield {"ph": "C", "name": "memory", "pid": _PROCESS, "tid": 0, "ts": stamp, "args": values}
    if timeline.host_bytes.any():
        for stamp, n_bytes in zip(_stamps(timeline), timeline.host_bytes.tolist(), strict=False):
            yield {
                "ph": "C", "name": "host memory", "pid": _PROCESS, "tid": 0, "ts": stamp, "args": {"bytes": n_bytes},
            }  # fmt: skip
