"""How PyTorch spreads a model over a mesh, as a value of plans: carried out, and written as code.

    sharding = Sharding(Mesh.of({"dp": 2, "tp": 4}), {"layers.*.up": "ColwiseParallel()"})
    sharding.parallelize(model, device_mesh)

Modules with a style are cut on the last axis of the mesh, by ``parallelize_module``. The other axes, or all where no
module has a style, are for data (``Ranks.spread_data``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from sacplan.core.files import Name
from sacplan.distributed.sharding.mesh import Mesh
from sacplan.errors import PlanError

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

_STYLES = (
    "ColwiseParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "PrepareModuleInput",
    "PrepareModuleOutput",
)
CLASSES = "ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)"
"""The style of a head whose outputs, DTensors cut by classes, are for ``loss_parallel``."""

_OWN = ("Replicated",)
_PLACEMENTS = ("Replicate", "Shard")


class Sharding(Struct, frozen=True, forbid_unknown_fields=True):
    """How PyTorch spreads a model over a mesh.

    Attributes:
        mesh: the ranks.
        styles: what ``parallelize_module`` is given for the last axis: expressions that make a ``ParallelStyle``, by
            pattern of modules, in which ``*`` stands for the number of a repeated layer.
    """

    mesh: Mesh
    styles: Mapping[Name, str] = {}

    def __post_init__(self) -> None:
        for pattern, text in self.styles.items():
            _parsed(text, pattern)
        if len(self.data.axes) > 2:
            raise PlanError(
                f"mesh {self.mesh} has {len(self.data.axes)} axes for data; PyTorch takes one, or two: replicas, and "
                "shards."
            )

    @property
    def data(self) -> Mesh:
        """The axes for data."""
        return Mesh(self.mesh.axes[:-1] if self.styles else self.mesh.axes)

    def parallelize(self, model: nn.Module, device_mesh: DeviceMesh, source: int | None = 0) -> None:
        """Call ``parallelize_module``, and ``loss_parallel`` where a head is cut for it.

        Args:
            model: whole on each rank.
            device_mesh: the ranks of ``mesh``.
            source: the rank of the axis whose parameters the others get; None: each rank cuts its own.
        """
        if not self.styles:
            return
        from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

        tied = _tied(model)
        styles = {pattern: _made(_parsed(text, pattern)) for pattern, text in self.styles.items()}
        parallelize_module(model, axes_of(device_mesh, self.mesh.names[-1:]), styles, src_data_rank=source)
        for first, *others in tied:
            for name in others:
                module, _, own = name.rpartition(".")
                model.get_submodule(module).register_parameter(own, model.get_parameter(first))
        if CLASSES in self.styles.values():
            loss_parallel().__enter__()  # for all steps, forward and backward: it is on until it is left

    def code(self, device: str, units: Sequence[str] | None) -> str:
        """Return Python that does what ``parallelize`` and ``spread_data`` do, with the plan applied in between."""
        lines = [f"mesh = init_device_mesh({device!r}, {self.mesh.ranks}, mesh_dim_names={self.mesh.names})"]
        if self.styles:
            styles = (f"    {pattern!r}: {text}," for pattern, text in self.styles.items())
            lines += ["styles = {", *styles, "}"]
            lines.append(f"parallelize_module(model, mesh[{self.mesh.names[-1]!r}], styles)")
        lines.append("# recomputation of the plan, which sacplan.apply installs here")
        data = f"mesh[{', '.join(map(repr, self.data.names))}]" if self.styles else "mesh"
        if self.data.size > 1 and units is None:
            lines.append("model = DistributedDataParallel(model)")
        elif self.data.size > 1:
            lines += _fully_shard_lines(units or (), data)
        if CLASSES in self.styles.values():
            lines.append("loss_parallel().__enter__()  # for all steps, forward and backward")
        return "\n".join([*_imports("\n".join(lines)), "", *lines, ""])


def axes_of(device_mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    """Return the submesh of the named axes."""
    return device_mesh[tuple(names) if len(names) > 1 else names[0]]


def _fully_shard_lines(units: Sequence[str], mesh: str) -> Iterator[str]:
    for unit in units:
        stack = unit.removesuffix(".*")
        module = f"model.get_submodule({stack!r})" if stack else "model"
        if stack == unit:
            yield f"fully_shard({module}, mesh={mesh})"
        else:
            yield f"for layer in {module}.children():"
            yield f"    fully_shard(layer, mesh={mesh})"


_HOMES = {
    "torch.distributed.device_mesh": ("init_device_mesh",),
    "torch.distributed.fsdp": ("fully_shard",),
    "torch.distributed.tensor": _PLACEMENTS,
    "torch.distributed.tensor.parallel": (*_STYLES, "loss_parallel", "parallelize_module"),
    "torch.nn.parallel": ("DistributedDataParallel",),
    "sacplan": _OWN,
}


def _imports(text: str) -> Iterator[str]:
    """Yield the imports of the names that are called in a text."""
    for module, names in _HOMES.items():
        used = [name for name in names if f"{name}(" in text]
        if used:
            yield f"from {module} import {', '.join(used)}"


def _parsed(text: str, pattern: str) -> ast.Expression:
    """Return the expression of a style: a call whose arguments are placements, numbers and truth values.

    Raises:
        PlanError: the text is anything else.
    """
    known = (*_STYLES, *_OWN)
    try:
        found = ast.parse(text, mode="eval")
    except SyntaxError:
        found = ast.Expression(ast.Constant(None))
    if not isinstance(found.body, ast.Call) or not _is_made_of(found.body, known):
        raise PlanError(f"the style of {pattern!r} is {text!r}; it is a call of one of {', '.join(known)}.")
    return found


def _is_made_of(node: ast.expr, names: Sequence[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
        return all(
            _is_made_of(value, _PLACEMENTS) for value in (*node.args, *(k.value for k in node.keywords))
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _made(style: ast.Expression) -> Any:
    """Return the style that an expression, checked by ``_parsed``, makes."""
    from torch.distributed import tensor
    from torch.distributed.tensor import parallel

    from sacplan.distributed.sharding import replicated

    names = {**vars(tensor), **vars(parallel), **vars(replicated)}
    return eval(compile(style, "style", "eval"), {"__builtins__": {}}, names)


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several: a style gives each module a tensor of its own."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]
