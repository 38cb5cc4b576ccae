"""The tensor-parallel style of each module, which ``parallelize_module`` is told, on one axis of a mesh.

    styles = tensor_parallel(program, fingerprint, model, ("tp", 4), sequence=True)

Pairs of columns and rows (``pairs.py``) are cut with nothing gathered between them. Embeddings and other linear layers,
such as a head, are cut where the ranks divide them, and their outputs are gathered. All other modules are whole
(``replicated.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from torch import nn

from sacplan.core.elements import by_pattern, pattern_of
from sacplan.core.fingerprint import Fingerprint
from sacplan.core.program import ROOT_SCOPE, Program
from sacplan.distributed.sharding.pairs import pairs_of
from sacplan.distributed.sharding.sharding import CLASSES
from sacplan.errors import PlanError

_GATHERED = "ColwiseParallel(output_layouts=Replicate())"


def tensor_parallel(
    program: Program,
    fingerprint: Fingerprint,
    model: nn.Module,
    axis: tuple[str, int],
    sequence: bool = False,
) -> dict[str, str]:
    """Return the styles of modules, an expression each, by name, or by pattern where all layers are alike.

    Args:
        program: the recorded step of the whole model on one device.
        fingerprint: of the model.
        model: the model.
        axis: name and number of ranks.
        sequence: whether activations between pairs, and the loss, are cut as well.

    Raises:
        PlanError: no module can be cut over so many ranks.
    """
    kinds, ranks = kinds_of(model), axis[1]
    pairs = pairs_of(program, fingerprint.parameters, tuple(kinds.items()), ranks)
    styles = {}
    for name, kind in kinds.items():
        dim = kind == "Embedding"  # 0, the vocabulary of a head; 1, the features of an embedding
        if name in pairs.columns:
            styles[name] = "ColwiseParallel()"
        elif name in pairs.rows:
            styles[name] = "RowwiseParallel()"
        elif name in pairs.norms:
            styles[name] = f"SequenceParallel(sequence_dim={pairs.norms[name]}, use_local_output=True)"
        elif kind in ("Embedding", "Linear") and not model.get_parameter(f"{name}.weight").shape[dim] % ranks:
            styles[name] = _GATHERED
    if not styles:
        raise PlanError(
            f"{ranks} ranks of axis {axis[0]!r} divide no nn.Linear or nn.Embedding of "
            f"{fingerprint.model_class} that parallelize_module could cut: choose another number of ranks."
        )
    if sequence:
        styles |= dict(_along_sequences(program, model, styles, ranks))
    # Whole parameters are DTensors as well: optimizers do not take plain tensors and DTensors together.
    everywhere = {name: styles.get(name, "Replicated()") for name in kinds}
    return by_pattern(everywhere, everywhere, pattern_of)


def _along_sequences(
    program: Program, model: nn.Module, styles: Mapping[str, str], ranks: int
) -> Iterator[tuple[str, str]]:
    """Yield the styles that change if activations between pairs, and the loss, are cut as well.

    Embeddings and rows return DTensors that are cut in the dimension before the features, and DTensor places what is
    computed from these. What linear layers read is gathered where it is made, once for all of them. Linear layers of
    which a loss takes the logarithm of softmax are cut by classes.
    """
    for name, (scope, *_) in program.calls.items():
        module, style = model.get_submodule(name), styles.get(name, "")
        inside = program.ops_in(scope)
        if isinstance(module, nn.Embedding) or style == "RowwiseParallel()":
            cut = (
                f"output_layouts=Shard({len(program.tensors[program.ops[inside[-1]].outputs[0]].shape) - 2})"
            )
            given = "" if isinstance(module, nn.Linear) else "input_layouts=Replicate(), "
            is_cut = not given or (style and not model.get_parameter(f"{name}.weight").shape[0] % ranks)
            rows = f"RowwiseParallel({given}{cut}, use_local_output=False)"
            yield name, rows if is_cut else f"Replicated({cut})"
        elif isinstance(module, nn.Linear):
            for maker in {_maker(program, s) for i in inside for s in program.ops[i].reads}:
                if maker not in (name, *styles) and any(
                    True for _ in model.get_submodule(maker).parameters(False)
                ):
                    yield maker, "Replicated(output_layouts=Replicate())"
    for op in program.ops:
        if op.name == "aten._log_softmax.default":
            # Back through casts and other ops that read one storage.
            storage, *_ = op.reads
            while len(reads := program.ops[program.writer[storage]].reads) == 1:
                storage, *_ = reads
            if styles.get(maker := _maker(program, storage)) == _GATHERED:
                yield maker, CLASSES


def _maker(program: Program, storage: int) -> str:
    """Return the innermost module in which a storage is made; ``""`` if no submodule has made it."""
    scope = program.ops[program.writer[storage]].scope if storage in program.writer else ROOT_SCOPE
    return program.scopes[scope].fqn if scope != ROOT_SCOPE else ""


def kinds_of(model: nn.Module) -> dict[str, str]:
    """Return ``"Linear"``, ``"Embedding"``, ``"Norm"`` or ``""`` for the innermost modules that have parameters.

    Modules that share parameters with others are ``""`` as well: a shared parameter must have one placement.
    """
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    found = {}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and not any(True for _ in module.children()):
            linear = next((k.__name__ for k in (nn.Linear, nn.Embedding) if isinstance(module, k)), "")
            kind = linear or ("Norm" if "norm" in type(module).__name__.lower() else "")
            found[name] = kind if all(owners[id(p)] == 1 for p in own) else ""
    return found
