"""The module tree with what a planner needs to know of each module, and the memory rows of a step.

All values are frozen: bytes are ``int``, times are milliseconds. The statistics follow those of
PyTorch's prototype (PR #137908), with two important differences: ``sac_memory`` counts only what
autograd keeps inside a module, so a discarded share of it is memory freed, and ``points`` lists
what can be reached exactly, in addition to the fit.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from sacplan.core.arguments import check_statistics, checked
from sacplan.core.near import did_you_mean
from sacplan.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class ExactTradeoff:
    """A trade-off that a module can reach exactly.

    ``discard_ratio`` is the share of ``sac_memory`` that is discarded, in [0, 1];
    ``recompute_ms`` is the time to compute it again.
    """

    discard_ratio: float
    recompute_ms: float

    def __post_init__(self) -> None:
        if not 0 <= self.discard_ratio <= 1:
            raise PlanError(f"discard ratio {self.discard_ratio!r} is not in [0, 1]")
        if not 0 <= self.recompute_ms < math.inf:
            raise PlanError(f"recompute time {self.recompute_ms!r} ms is not finite and non-negative")


@dataclass(frozen=True, slots=True)
class SACStats:
    """The ops of one module in forward order; input of the per-module policy.

    Indices refer to ``func_names``. ``runtimes`` are ms, ``memory`` bytes of each op's output.
    ``inplace_ops`` are pairs (op, the op whose output it writes, or the op itself if that is unknown).
    """

    func_names: tuple[str, ...]
    runtimes: tuple[float, ...]
    memory: tuple[int, ...]
    view_like_ops: tuple[int, ...] = ()
    rand_ops: tuple[int, ...] = ()
    saved_autograd_ops: tuple[int, ...] = ()
    inplace_ops: tuple[tuple[int, int], ...] = ()
    force_store_random: bool = False

    def __post_init__(self) -> None:
        check_statistics("SACStats", PlanError, runtimes=self.runtimes, memory=self.memory)
        if not len(self.func_names) == len(self.runtimes) == len(self.memory):
            raise PlanError(
                f"SACStats: {len(self.func_names)} func_names, {len(self.runtimes)} runtimes and {len(self.memory)} "
                "sizes in memory; give one of each for every op."
            )


_BYTES_AND_TIMES = (
    "param_per_module", "grad_per_module", "grad_total", "act_fw_per_module", "act_bw_per_module",
    "act_grad_per_module", "act_total", "input_per_module", "output_per_module", "fw_runtime_per_module",
    "bw_runtime_per_module", "sac_runtime", "sac_memory",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModuleStats:
    """Memory, time and trade-off of one module. Bytes and milliseconds."""

    fqn: str
    param_per_module: int = 0
    grad_per_module: int = 0
    grad_total: int = 0
    """Gradients alive when the module's backward begins."""
    act_fw_per_module: int = 0
    act_bw_per_module: int = 0
    act_grad_per_module: int = 0
    """Activation gradients at the peak of the module's backward."""
    act_total: int = 0
    """Activations alive when the module's forward ends."""
    input_per_module: int = 0
    output_per_module: int = 0
    fw_runtime_per_module: float = 0.0
    bw_runtime_per_module: float = 0.0
    is_leaf: bool = False
    """Leaves are never checkpointed units."""
    sac_runtime: float = 0.0
    """The time of which the recompute shares below are shares."""
    sac_memory: int = 0
    """What autograd keeps inside the module; discard ratios are shares of it."""
    n_segments: int = 0
    slopes: tuple[float, ...] = ()
    intercepts: tuple[float, ...] = ()
    """Recompute share of ``sac_runtime`` = max over segments of slope * discard ratio + intercept."""
    breakpoints: tuple[float, ...] = ()
    tradeoff_curve: tuple[tuple[float, float], ...] = ()
    """(discard ratio, recompute share of ``sac_runtime``)."""
    points: tuple[ExactTradeoff, ...] = ()
    """Every trade-off that can be reached exactly, other than 'discard nothing'."""

    def __post_init__(self) -> None:
        if not self.n_segments == len(self.slopes) == len(self.intercepts):
            raise PlanError(
                f"module {self.fqn!r}: n_segments is {self.n_segments}, but there are "
                f"{len(self.slopes)} slopes and {len(self.intercepts)} intercepts"
            )
        check_statistics(
            f"module {self.fqn!r}",
            PlanError,
            **{name: getattr(self, name) for name in _BYTES_AND_TIMES},
            # Intercepts may be negative, so of these only that they are finite is checked.
            slopes_and_intercepts=[abs(x) for x in (*self.slopes, *self.intercepts)],
        )


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """The statistics of each module, and the orders in which the modules ran."""

    stats: tuple[ModuleStats, ...]
    fw_pre_order: tuple[str, ...]
    fw_post_order: tuple[str, ...]
    bw_pre_order: tuple[str, ...] = ()
    bw_post_order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MemorySegment:
    """The bytes that are alive at a moment of the recorded step.

    The first ``position`` modules of ``fw_post_order`` have ended their forward and not begun their
    backward, so the tensors that they discard are not alive. ``sharded_bytes`` (parameters, gradients, optimizer
    state) is divided by the world size. ``name`` says what is running, for messages: an fqn or
    ``"optimizer step"``; if empty, it is the module that ends its forward next.
    """

    position: int
    sharded_bytes: int
    local_bytes: int
    name: str = ""


class MemoryRow(NamedTuple):
    """``n_bytes`` are alive, less what the first ``position`` modules of ``fw_post_order`` discard."""

    position: int
    n_bytes: int
    name: str


@dataclass(frozen=True, slots=True)
class Graph:
    """The module tree in execution order, and the memory rows of one step. Immutable.

    ``nodes`` are in forward pre-order; an *index* is a position in it. ``root`` is the fqn of the module
    that contains all others: ``""``, or a class name, which prefixes all other names or none. If
    ``segments`` is empty, the rows are the classical ones, one per module. To attach a recording's
    segments: ``dataclasses.replace(graph, segments=...)``.

    Raises:
        PlanError: names are unknown, missing or repeated, or positions are out of range.
    """

    nodes: tuple[ModuleStats, ...]
    fw_post_order: tuple[str, ...]
    root: str
    segments: tuple[MemorySegment, ...] = ()
    _index: dict[str, int] = field(init=False, repr=False, compare=False)
    _parent: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _position: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [node.fqn for node in self.nodes]
        if not names:
            raise PlanError("a graph needs at least one module; was the forward pass recorded?")
        _check_unique(names, "the module statistics")
        _check_unique(self.fw_post_order, "fw_post_order")
        _check_same(self.fw_post_order, names, "fw_post_order", "the module statistics")
        index = {fqn: i for i, fqn in enumerate(names)}
        if self.root not in index:
            raise PlanError(f"root {self.root!r} has no statistics; the first modules are {names[:5]}")
        for segment in self.segments:
            if not 0 <= segment.position <= len(names):
                raise PlanError(f"{segment} is not within a step of {len(names)} modules")
        # The class is frozen: its look-ups are made once, here.
        object.__setattr__(self, "_index", index)
        object.__setattr__(self, "_parent", tuple(_parent_of(fqn, self.root, index) for fqn in names))
        object.__setattr__(self, "_position", {fqn: p for p, fqn in enumerate(self.fw_post_order)})

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, fqn: str) -> ModuleStats:
        return self.nodes[self.index(fqn)]

    def __contains__(self, fqn: object) -> bool:
        return fqn in self._index

    def index(self, fqn: str) -> int:
        """Return the position of a module in forward pre-order."""
        try:
            return self._index[fqn]
        except KeyError:
            raise PlanError(f"unknown module {fqn!r}.{did_you_mean(fqn, self._index)}") from None

    def position(self, fqn: str) -> int:
        """Return how many modules end their forward before this one."""
        self.index(fqn)
        return self._position[fqn]

    def parent(self, fqn: str) -> str | None:
        """Return the nearest module around this one that ran; None for the root."""
        parent = self._parent[self.index(fqn)]
        return None if parent < 0 else self.nodes[parent].fqn

    def ancestors(self, fqn: str) -> tuple[str, ...]:
        """Return the modules around this one, from the parent up to the root."""
        around = []
        i = self._parent[self.index(fqn)]
        while i >= 0:
            around.append(self.nodes[i].fqn)
            i = self._parent[i]
        return tuple(around)

    def match(self, names: Iterable[str], argument: str) -> frozenset[str]:
        """Resolve a user's names: exact fqns, with or without the root's as a prefix.

        Raises:
            PlanError: no module has a name; lists similar ones. ``argument`` says where the names come from.
        """
        if isinstance(names, str):
            raise PlanError(f"{argument} is the string {names!r}; give a list of module names")
        matched = set()
        for name in names:
            # The root may be a class name. The graph then has it before all names or before none, and users write
            # either.
            prefixed = f"{self.root}.{name}"
            if name in self._index:
                matched.add(name)
            elif prefixed in self._index:
                matched.add(prefixed)
            elif self.root and name.startswith(self.root + ".") and name[len(self.root) + 1 :] in self._index:
                matched.add(name[len(self.root) + 1 :])
            else:
                raise PlanError(f"{argument}: unknown module {name!r}.{did_you_mean(name, self._index)}")
        return frozenset(matched)

    def memory_rows(self, world_size: int = 1) -> list[MemoryRow]:
        """Return the rows by position, each with the name of what is running then.

        From the segments, the largest per position. Without segments one row per module i, as in PR
        #137908: ceil((parameters of the root + grad_total_i) / world_size) + act_total_i + act_grad_i.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise PlanError(f"world_size is {world_size!r}; it must be an int of at least 1")
        if not self.segments:
            parameters = self[self.root].param_per_module
            rows = [
                MemoryRow(
                    self._position[node.fqn],
                    # Rounded up, since where shards differ in size the largest one counts.
                    -(-(parameters + node.grad_total) // world_size)
                    + node.act_total
                    + node.act_grad_per_module,
                    node.fqn,
                )
                for node in self.nodes
            ]
            return sorted(rows)
        # ``running[position]`` is the module that ends next. After the last one only the root is left.
        running = (*self.fw_post_order, self.root)
        largest: dict[int, MemoryRow] = {}
        for segment in self.segments:
            n_bytes = -(-segment.sharded_bytes // world_size) + segment.local_bytes
            if segment.position not in largest or n_bytes > largest[segment.position].n_bytes:
                name = segment.name or running[segment.position]
                largest[segment.position] = MemoryRow(segment.position, n_bytes, name)
        return [largest[position] for position in sorted(largest)]

    def to_frame(self) -> pd.DataFrame:
        """Return one row per module in execution order, with the scalar statistics."""
        import pandas as pd

        skip = {"slopes", "intercepts", "breakpoints", "tradeoff_curve", "points"}
        columns = [f.name for f in dataclasses.fields(ModuleStats) if f.name not in skip]
        rows = [
            {name: getattr(node, name) for name in columns}
            | {"parent": self.parent(node.fqn), "n_points": len(node.points)}
            for node in self.nodes
        ]
        return pd.DataFrame(rows).set_index("fqn")


@checked(PlanError)
def parse_module_info(module_info: ModuleInfo, *, root: str | None = None) -> Graph:
    """Build the tree of modules, in execution order.

    Args:
        module_info: statistics in any order, and the recorded orders. The backward orders may lack
            modules that have no backward.
        root: fqn of the module that contains all others; by default the first that ran.

    Raises:
        PlanError: orders and statistics do not name the same modules, or name one twice.
    """
    stats = {node.fqn: node for node in module_info.stats}
    _check_unique([node.fqn for node in module_info.stats], "the module statistics")
    for argument in ("fw_pre_order", "fw_post_order", "bw_pre_order", "bw_post_order"):
        order: tuple[str, ...] = getattr(module_info, argument)
        _check_unique(order, argument)
        # Every module that ran has a forward, but not every one has a backward.
        if argument.startswith("fw"):
            _check_same(order, stats, argument, "the module statistics")
        elif unknown := [fqn for fqn in order if fqn not in stats]:
            raise PlanError(f"{argument} names modules without statistics: {_some(unknown)}")
    if not stats:
        raise PlanError("there are no module statistics; was the forward pass run under the estimators?")
    return Graph(
        nodes=tuple(stats[fqn] for fqn in module_info.fw_pre_order),
        fw_post_order=tuple(module_info.fw_post_order),
        root=module_info.fw_pre_order[0] if root is None else root,
    )


@checked(PlanError)
def get_peak_memory_runtime_baseline(graph: Graph) -> tuple[int, float]:
    """Return the peak on one rank in bytes, and forward plus backward in ms, without checkpointing."""
    root = graph[graph.root]
    peak_bytes = max(row.n_bytes for row in graph.memory_rows())
    return peak_bytes, root.fw_runtime_per_module + root.bw_runtime_per_module


def _parent_of(fqn: str, root: str, index: dict[str, int]) -> int:
    if fqn == root:
        return -1
    # The nearest name around it that ran: a container such as ``ModuleList`` has no call of its own.
    path = fqn
    while "." in path:
        path = path.rpartition(".")[0]
        if path in index:
            return index[path]
    return index[root]


def _check_unique(names: Sequence[str], where: str) -> None:
    if len(set(names)) < len(names):
        repeated = [name for name, count in Counter(names).items() if count > 1]
        raise PlanError(f"{where} names modules more than once: {_some(repeated)}")


def _check_same(names: Iterable[str], known: Iterable[str], where: str, other: str) -> None:
    names, known = dict.fromkeys(names), dict.fromkeys(known)
    if unknown := [name for name in names if name not in known]:
        raise PlanError(f"{where} has modules that {other} lack: {_some(unknown)}")
    if missing := [name for name in known if name not in names]:
        raise PlanError(f"{where} lacks modules that {other} have: {_some(missing)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
