"""A sharding as code of what people already use: ``parallelize_module``, ``fully_shard``, a Hugging Face ``tp_plan``.

    emission = emit(sharding, described(model))
    print(emission.code or emission.reasons)

Not every sharding has that form. It is recognised in four steps, each of which may give reasons against it:

1. *Sort the axes.* An axis is a data axis if a place asks for a cut of dimension 0 of an input that is no weight. It is
   a tensor axis if it is none, and a parameter or an input is cut on it. An axis on which nothing is cut has no form.
2. *Data axes.* If parameters are cut on the axis, ``fully_shard`` is called on repeated layers and on the model. If
   they are replicated, the model gets DistributedDataParallel; beside an axis on which they are cut, ``fully_shard``
   gets replicas (hybrid sharding). There is at most one axis of each kind.
3. *The tensor axis.* There is at most one. Linear layers are cut by columns (dimension 0 of the weight) or by rows,
   embeddings by either; any other cut has no style. A module with both among its children is a group: activations stay
   cut between its columns and its rows, as in an MLP. Outside of groups the output of columns is gathered.
4. *Places.* Those on the tensor axis must ask for what the styles bring about anyway. Cuts of the sequence at all norms
   turn on sequence parallelism; at some norms only, there is no form.

In the code each rank gets its own part of the batch, and gradients are averaged over the data axes, as those tools do.
Layout and sizes of parameters are those of the sharding, though the elements of a rank may be others within an axis.
How the ops run in between is up to these tools, and is not compared here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sacplan._program.elements import by_pattern, pattern_of
from sacplan._shard.placements import REPLICATED, Placement, Placements
from sacplan._shard.places import CallPattern, matches
from sacplan._shard.sharding import Sharding
from sacplan._shard.tp_plans import PACKED

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Described:
    """The facts about a model that ``emit`` needs.

    Attributes:
        shapes: of parameters, by name.
        kinds: of the modules that have parameters of their own, by name: ``"Linear"``, ``"Embedding"``, ``"Norm"``, or
            the name of the class.
        shared: parameters that have several names, by their first one.
    """

    shapes: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def described(model: nn.Module) -> Described:
    """Return the facts about a model, which may be on the meta device."""
    from torch import nn

    def kind(module: nn.Module) -> str:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            return "Linear" if isinstance(module, nn.Linear) else "Embedding"
        name = type(module).__name__
        return "Norm" if "norm" in name.lower() else name

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return Described(
        {name: tuple(p.shape) for name, p in model.named_parameters()},
        {name: kind(m) for name, m in model.named_modules() if m._parameters},
        {first: tuple(others) for first, *others in names.values() if others},
    )


@dataclass(frozen=True, slots=True)
class Emission:
    """A sharding in the form of other tools, or the reasons why there is none.

    Attributes:
        code: Python source that defines ``shard(model, device_mesh)``, which returns the model to train; empty where
            it has no such form.
        tp_plan: styles by module for ``from_pretrained(..., tp_plan=...)``; empty where there is none.
        reasons: why it has no such form, a sentence each.
    """

    code: str
    tp_plan: Mapping[str, str]
    reasons: tuple[str, ...]


def emit(sharding: Sharding, model: Described, *, arriving_cut: Collection[str] | None = None) -> Emission:
    """Return a sharding as code.

    Args:
        sharding: the mesh, the layouts of parameters, and places.
        model: the facts about the model.
        arriving_cut: the linear modules whose input arrives cut along the dimension that they sum over, from the
            program of a rank. The input of other rows is gathered before them. None: it is judged by the widths of
            the modules (``_Styles._keeps_width``), and the caller knows that no op between needs all of it.

    Raises:
        PlanError: the sharding names a parameter that the model does not have, or cuts one that cannot be cut so.
    """
    whole = (REPLICATED,) * len(sharding.mesh.axes)
    homes = dict.fromkeys(model.shapes, whole) | sharding.layouts(list(model.shapes.items()))
    return _Emitter(sharding, homes, model, arriving_cut).emission()


_WEIGHTS = {
    "aten.embedding.default": (0,),
    "aten.linear.default": (1, 2),
    "aten.mm.default": (1,),
    "aten.addmm.default": (0, 2),
    "aten.convolution.default": (1, 2),
    "aten.native_layer_norm.default": (1, 2),
}
"""Arguments of ops that are not cut along the batch."""


def _asked(place: CallPattern, axis: int) -> Iterator[tuple[int, Placement]]:
    """Yield the inputs of a place that are asked for a placement on an axis: their number, and the placement."""
    for i, layout in enumerate(place.layouts):
        placement = None if layout is None else layout[axis]
        if placement is not None:
            yield i, placement


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


class _Emitter:
    """Recognises the form of a sharding, and writes it as code. The steps are those of the module's docstring."""

    def __init__(
        self,
        sharding: Sharding,
        homes: Mapping[str, Placements],
        model: Described,
        arriving_cut: Collection[str] | None,
    ) -> None:
        self.mesh, self.places = sharding.mesh, sharding.places
        mesh = self.mesh
        self.homes, self.model, self.arriving_cut = homes, model, arriving_cut
        self.reasons: list[str] = []  # against any code
        self.against_plan: list[str] = []  # against a tp_plan only
        # An axis of one rank does nothing, and must not turn on a tool for it.
        self.data = [i for i in range(len(mesh.axes)) if mesh.ranks[i] > 1 and self._cuts_batch(i)]
        self.tensor = [
            i
            for i in range(len(mesh.axes))
            if i not in self.data and (self._cut_at_home(i) or self._asked_cut(i))
        ]

    def emission(self) -> Emission:
        """See ``emit``."""
        idle = [
            name
            for i, (name, n) in enumerate(self.mesh.axes)
            if n > 1 and i not in self.data and i not in self.tensor
        ]
        # Reasons are collected, not raised one by one, so that the caller sees all of them. The steps that
        # follow run in spite of reasons as far as they can.
        if idle:
            self.reasons.append(f"on the axis {idle[0]!r} nothing is cut: all its ranks would do the same.")
        if len(self.tensor) > 1:
            names = " and ".join(repr(self.mesh.names[i]) for i in self.tensor)
            self.reasons.append(f"modules are cut on {names}; these tools cut them on one axis.")
        styles = None
        if len(self.tensor) == 1:
            styles = _Styles(self.model, self._on_axis(self.tensor[0]), self.arriving_cut)
        if styles is not None:
            self._read_places(styles)
            self.reasons += styles.problems()
        lines = [*self._tensor_lines(styles), *self._data_lines(bool(styles))]
        # Three kinds of reasons: against both forms, against code alone, against the plan alone.
        plan = {} if styles is None or self.reasons else styles.tp_plan(self.against_plan)
        only_code = styles.only_plan() if styles is not None else []
        code = "" if self.reasons or only_code else self._code(lines)
        return Emission(code, plan, (*self.reasons, *only_code, *self.against_plan))

    # --- axes ---------------------------------------------------------------------------------------------

    def _on_axis(self, axis: int) -> dict[str, Placement]:
        return {name: layout[axis] for name, layout in self.homes.items()}

    def _cut_at_home(self, axis: int) -> list[str]:
        return [name for name, placement in self._on_axis(axis).items() if placement.is_cut]

    def _asked_cut(self, axis: int) -> list[tuple[CallPattern, int]]:
        """Return the places that ask for a cut on an axis, with the dimension: one for each input."""
        return [
            (place, asked.dim) for place in self.places for _, asked in _asked(place, axis) if asked.is_cut
        ]

    def _cuts_batch(self, axis: int) -> bool:
        """Whether a place asks for a part of the batch: for a cut along dimension 0 of an input that is no weight."""
        return any(
            asked.is_cut and asked.dim == 0 and i not in _WEIGHTS.get(place.op, ())
            for place in self.places
            for i, asked in _asked(place, axis)
        )

    # --- the tensor axis ----------------------------------------------------------------------------------

    def _read_places(self, styles: _Styles) -> None:
        """Turn on sequence parallelism if places cut the sequence at norms, and check the other places on the axis.

        A cut that neither a style nor sequence parallelism brings about is a reason against any code.
        """
        asked = self._asked_cut(self.tensor[0])
        norms = {
            norm for norm in styles.norms for place, dim in asked if dim == 1 and matches(place.unit, norm)
        }
        if norms and norms != set(styles.norms):
            missing = sorted(set(styles.norms) - norms)[0]
            self.reasons.append(f"the sequence is cut at some norms, and not at {missing!r}.")
        styles.sequence = bool(norms)
        for place, dim in asked:
            # A place that only says what a style brings about anyway is no loss.
            follows = styles.follows(place.unit) or (dim == 1 and styles.sequence)
            if not follows:
                self.reasons.append(f"{place} cuts what these tools have whole there.")
        if styles.sequence:
            self.against_plan.append(
                "a tp_plan of styles by module does not say where the sequence is cut; use the code."
            )

    def _tensor_lines(self, styles: _Styles | None) -> list[str]:
        if styles is None:
            return []
        lines = [
            "parallelize_module(",
            "    model,",
            f"    device_mesh[{self.mesh.names[self.tensor[0]]!r}],",
        ]
        lines.append("    {")
        lines += [f"        {pattern!r}: {style}," for pattern, style in styles.code().items()]
        return [*lines, "    },", ")"]

    # --- data axes ----------------------------------------------------------------------------------------

    def _data_lines(self, has_tensor_axis: bool) -> list[str]:
        cut_axes = [i for i in self.data if self._cut_at_home(i)]
        whole = [i for i in self.data if i not in cut_axes]
        for i in cut_axes:
            self._check_fully_sharded(i)
        # Neither ``fully_shard`` nor DistributedDataParallel takes a second axis of its kind.
        if len(cut_axes) > 1 or len(whole) > 1:
            self.reasons.append("the batch is cut on several axes of one kind; make one axis of them.")
            return []
        # Replicas alone: DistributedDataParallel. It takes plain parameters, and those of a tensor axis are
        # DTensors.
        if whole and not cut_axes:
            if has_tensor_axis:
                self.reasons.append(
                    "DistributedDataParallel does not take a model with a tensor axis; cut the parameters on the data "
                    "axis too."
                )
            group = f"process_group=device_mesh.get_group({self.mesh.names[whole[0]]!r})"
            return [f"model = DistributedDataParallel(model, {group})"]
        # No data axis at all.
        if not cut_axes:
            return []
        # With two mesh dimensions, ``fully_shard`` replicates on the first and shards on the second
        # (``HSDPMeshInfo`` in ``_fsdp_init.py``).
        if whole and whole[0] > cut_axes[0]:
            self.reasons.append("fully_shard has its replicas on an axis before the one on which it cuts.")
        names = [self.mesh.names[i] for i in (*whole, *cut_axes)]
        index = repr(names[0]) if len(names) == 1 else ", ".join(map(repr, names))
        lines = [f"data_mesh = device_mesh[{index}]"]
        given = "mesh=data_mesh"
        # ``fully_shard`` cuts dimension 0 unless ``shard_placement_fn`` says otherwise.
        later = {name: p.dim for name, p in self._on_axis(cut_axes[0]).items() if p.is_cut and p.dim > 0}
        if later:
            lines += ["dims = {", *(f"    {name!r}: {dim}," for name, dim in later.items()), "}"]
            lines.append("placements = {model.get_parameter(name): Shard(dim) for name, dim in dims.items()}")
            given += ", shard_placement_fn=placements.get"
        # Layers before the model: ``fully_shard`` leaves parameters out that an inner call has taken.
        for layers in self._repeated():
            source = f"model.get_submodule({layers!r})" if layers else "model"
            lines += [f"for layer in {source}.children():", f"    fully_shard(layer, {given})"]
        return [*lines, f"fully_shard(model, {given})"]

    def _check_fully_sharded(self, axis: int) -> None:
        n, name = self.mesh.ranks[axis], self.mesh.names[axis]
        for parameter, placement in self._on_axis(axis).items():
            shape = self.model.shapes[parameter]
            if not shape:
                self.reasons.append(f"parameter {parameter!r} is a scalar, which fully_shard does not cut.")
                return
            divides = self._local_rows(parameter, axis) % n == 0
            # One that the ranks do not divide is replicated here, and cut unevenly by fully_shard: that is let pass.
            if not placement.is_cut and divides:
                self.reasons.append(
                    f"parameter {parameter!r} is whole on the data axis {name!r}, and others are not; fully_shard cuts "
                    "all that it is called on."
                )
                return

    def _local_rows(self, parameter: str, axis: int) -> int:
        """Return the first dimension of a rank's part, as other axes cut it."""
        rows = self.model.shapes[parameter][0]
        for i, placement in enumerate(self.homes[parameter]):
            if i != axis and placement.is_cut and placement.dim == 0:
                rows //= self.mesh.ranks[i]
        return rows

    def _repeated(self) -> list[str]:
        """Return the outermost modules whose children are numbered, in the order of parameters."""
        found = []
        for name in self.model.shapes:
            parts = name.split(".")
            at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
            if at is not None:
                found.append(".".join(parts[:at]))
        return list(dict.fromkeys(found))

    # --- writing ------------------------------------------------------------------------------------------

    def _code(self, lines: Iterable[str]) -> str:
        body = list(lines)
        text = "\n".join(body)
        ranks, names = tuple(self.mesh.ranks), tuple(self.mesh.names)
        return "\n".join(
            [
                *_imports(text),
                "",
                "",
                "def shard(model, device_mesh):",
                f'    """device_mesh: init_device_mesh(device, {ranks}, mesh_dim_names={names})"""',
                *(f"    {line}" for line in body),
                "    return model",
                "",
            ]
        )


def _imports(text: str) -> list[str]:
    """Return the imports of the names that occur in a text."""
    modules = {
        "torch.distributed.fsdp": ("fully_shard",),
        "torch.distributed.tensor": ("Replicate", "Shard"),
        "torch.distributed.tensor.parallel": (
            "ColwiseParallel",
            "PrepareModuleInput",
            "PrepareModuleOutput",
            "RowwiseParallel",
            "SequenceParallel",
            "parallelize_module",
        ),
        "torch.nn.parallel": ("DistributedDataParallel",),
    }
    found = []
    for module, names in modules.items():
        used = [name for name in names if f"{name}(" in text]
        if used:
            found.append(f"from {module} import {', '.join(used)}")
    return found


class _Styles:
    """The tensor-parallel style of each module, from the placements of its parameters on one axis."""

    def __init__(
        self, model: Described, homes: Mapping[str, Placement], arriving_cut: Collection[str] | None
    ) -> None:
        self.model, self.homes, self.arriving_cut = model, homes, arriving_cut
        self.sequence = False
        self.how: dict[str, str] = {}  # module to "columns", "rows", "packed columns", ...
        self.experts: dict[str, dict[str, str]] = {}  # module to its parameters and their styles in a tp_plan
        self._problems: list[str] = []
        for module in model.kinds:
            self._classify(module)
        # A group is a module that has both. ``_keeps_width`` then asks whether what is between may stay cut.
        rows = {_parent(m) for m, how in self.how.items() if how.endswith("rows") and self._is_linear(m)}
        columns = {
            _parent(m) for m, how in self.how.items() if how.endswith("columns") and self._is_linear(m)
        }
        self.groups = {group for group in rows & columns if self._keeps_width(group)}
        """Modules with columns and then rows among their children: between them each rank has a part."""
        self.partial = {
            m for m in model.kinds if _parent(m) in self.groups and m not in self.how and self._is_between(m)
        }
        """Modules in a group with replicated parameters that meet cut activations: their gradients are partial."""
        self.norms = [m for m, kind in model.kinds.items() if kind == "Norm" and m not in self.partial]

    def _is_linear(self, module: str) -> bool:
        return self.model.kinds[module] == "Linear"

    def _classify(self, module: str) -> None:
        # A module is classified by the placements of its own parameters.
        own = {p.rpartition(".")[2]: self.homes[p] for p in self.model.shapes if _parent(p) == module}
        cuts = {f"{module}.{name}": placement for name, placement in own.items() if placement.is_cut}
        # Replicated: no style.
        if not cuts:
            return
        kind = self.model.kinds[module]
        weight, bias = own.get("weight", REPLICATED), own.get("bias")
        shared = [p for p in self.model.shared if _parent(p) == module]
        # Noted besides the style: both may hold, and only the problem is reported.
        if shared:
            self._problems.append(
                f"parameter {shared[0]!r} is also {self.model.shared[shared[0]][0]!r}; these tools would cut one "
                "of the two and part them."
            )
        packed = "packed " if weight.outer == PACKED else ""
        columns = weight.is_cut and weight.dim == 0 and (bias is None or bias == weight)
        rows = weight.is_cut and weight.dim == 1 and (bias is None or not bias.is_cut)
        if "Experts" in kind and all(map(_expert_style, cuts.values())):
            self.experts[module] = {name: _expert_style(placement) for name, placement in cuts.items()}
        elif kind not in ("Linear", "Embedding") or not (columns or rows) or weight.outer not in (1, PACKED):
            name, placement = next(iter(cuts.items()))
            self._problems.append(
                f"parameter {name!r} of the {kind} {module!r} is cut as {placement}, which is no style of these tools."
            )
        elif kind == "Embedding":
            self.how[module] = "embedding rows" if columns else "embedding columns"
        else:
            self.how[module] = packed + ("columns" if columns else "rows")

    def _linears(self, group: str, what: str) -> list[tuple[int, ...]]:
        """Return the shapes (out, in) of the weights of a module's children that are cut by columns, or by rows."""
        return [
            self.model.shapes[f"{m}.weight"]
            for m, how in self.how.items()
            if _parent(m) == group and how.endswith(what) and self._is_linear(m)
        ]

    def _widths(self, module: str) -> set[int]:
        """Return the last dimensions of a module's own parameters."""
        return {shape[-1] for p, shape in self.model.shapes.items() if _parent(p) == module and shape}

    def _keeps_width(self, group: str) -> bool:
        """Whether activations may stay cut from the columns of a group to its rows.

        If not, they are gathered and cut again, as Hugging Face does.
        """
        if self.arriving_cut is not None:  # known from the program of a rank: no need to guess
            rows = [m for m, how in self.how.items() if _parent(m) == group and how.endswith("rows")]
            return all(m in self.arriving_cut for m in rows)
        # Columns that are wider than the rows hold several matrices in one, which a plain cut would mix, unless they
        # are marked as packed. A module between that is as wide as the columns, such as a norm, needs all of a row.
        taken = max(inward for _, inward in self._linears(group, "rows"))
        packed = any(_parent(m) == group and how == "packed columns" for m, how in self.how.items())
        made = {out for out, _ in self._linears(group, "columns")}
        others = [m for m in self.model.kinds if _parent(m) == group and m not in self.how]
        return (packed or max(made) <= taken) and not any(self._widths(m) & made for m in others)

    def _is_between(self, module: str) -> bool:
        """Whether a child of a group runs between its columns and its rows.

        A child before the columns has the width of their input.
        """
        # A child that is as wide as the input of the columns, such as a norm before them, meets full
        # activations.
        inward = {i for _, i in self._linears(_parent(module), "columns")}
        return not self._widths(module) & inward

    def follows(self, unit: str) -> bool:
        """Whether inputs of a module are cut under the styles anyway, so that a place need not ask for it."""
        return any(matches(unit, module) for module in (*self.how, *self.groups, *self.partial))

    def problems(self) -> list[str]:
        """Return why there is neither code nor a plan."""
        return self._problems

    def only_plan(self) -> list[str]:
        """Return why there is no code, where there may be a plan."""
        found = []
        packed = [m for m, how in self.how.items() if how.startswith("packed")]
        if packed:
            found.append(
                f"{packed[0]!r} has several matrices in one; parallelize_module would cut across them."
            )
        if self.partial:
            module = sorted(self.partial)[0]
            found.append(
                f"parameters of {module!r} are whole, and only a part of what they meet is on each rank: "
                "parallelize_module would not add up their gradients."
            )
        if self.experts:
            found.append(
                f"{next(iter(self.experts))!r} holds experts; parallelize_module has no style for them."
            )
        embeddings = [m for m, kind in self.model.kinds.items() if kind == "Embedding"]
        if self.sequence and len(embeddings) != 1:
            found.append(f"the sequence would be cut after an embedding, and there are {len(embeddings)}.")
        return found

    # --- PyTorch's styles ---------------------------------------------------------------------------------

    def code(self) -> dict[str, str]:
        """Return the expression of a style by pattern of modules."""
        styles: dict[str, str] = {}
        for module in self.model.kinds:
            style = self._style(module)
            if style:
                styles[module] = style
        return self._grouped(styles)

    def _style(self, module: str) -> str:
        how, kind = self.how.get(module, ""), self.model.kinds[module]
        around = "Shard(1)" if self.sequence else "Replicate()"
        given = "input_layouts=Shard(1)" if self.sequence else ""
        in_group = _parent(module) in self.groups
        if how == "columns":
            # By default ``ColwiseParallel`` leaves its output cut and ``RowwiseParallel`` expects its input
            # cut (``torch/distributed/tensor/parallel/style.py``): right within a group. Elsewhere both must
            # say otherwise.
            gathered = "" if in_group else "output_layouts=Replicate()"
            return f"ColwiseParallel({', '.join(filter(None, (given, gathered)))})"
        if how == "rows":
            split = given if in_group else given or "input_layouts=Replicate()"
            split = "" if in_group else split
            scattered = "output_layouts=Shard(1)" if self.sequence else ""
            return f"RowwiseParallel({', '.join(filter(None, (split, scattered)))})"
        if how == "embedding rows":
            return f"RowwiseParallel(input_layouts=Replicate(), output_layouts={around})"
        if how == "embedding columns":
            return f"ColwiseParallel(output_layouts={around})"
        if not self.sequence:
            return ""
        if module in self.norms:
            return "SequenceParallel(use_local_output=True)"
        if kind == "Embedding":
            return "PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))"
        layouts = "input_layouts=Shard(1), desired_input_layouts=Replicate()"
        return f"PrepareModuleInput({layouts}, use_local_output=True)"

    # --- Hugging Face -------------------------------------------------------------------------------------

    def tp_plan(self, against: list[str]) -> dict[str, str]:
        """Return the styles of Hugging Face by pattern of modules; empty where a plan cannot say it."""
        if self.sequence:
            return {}
        styles: dict[str, str] = {}
        for module, how in self.how.items():
            in_group = _parent(module) in self.groups
            styles[module] = {
                "columns": "colwise" if in_group else "colwise_gather_output",
                "rows": "rowwise" if in_group else "rowwise_split_input",
                "packed columns": "packed_colwise",
                "packed rows": "packed_rowwise",
                "embedding rows": "embedding_rowwise",
                "embedding columns": "embedding_colwise",
            }[how]
        styles.update(dict.fromkeys(self.partial, "replicated_with_grad_allreduce"))
        for module, of_parameters in self.experts.items():
            styles |= {module: "moe_tp_experts", **of_parameters}
        found = self._grouped(styles)
        single = [name for name in found if any(part.isdecimal() for part in name.split("."))]
        # A plan has one entry for all layers of a pattern, so it cannot give one of them a style of its own.
        if single:
            against.append(
                f"a tp_plan gives all layers the same styles, and {single[0]!r} differs from its like."
            )
            return {}
        return found

    def _grouped(self, styles: Mapping[str, str]) -> dict[str, str]:
        """Return one entry for repeated layers that are alike, in the order of modules."""
        names = (*self.model.kinds, *self.model.shapes)
        everywhere = {name: styles.get(name, "") for name in names}
        return by_pattern({name: styles[name] for name in names if name in styles}, everywhere, pattern_of)


def _expert_style(placement: Placement) -> str:
    """Return the style of a weight (experts, out, in) that is cut so; empty if there is none."""
    styles = {(1, 1): "colwise", (1, PACKED): "packed_colwise", (2, 1): "rowwise"}
    return styles.get((placement.dim, placement.outer), "")
