"""Products of matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sacplan.core.factors.pointwise import broadcast
from sacplan.core.factors.rule import Dims, Factors, Kind, Rule, RuleBuilder, register


def _letters(
    call: RuleBuilder, words: Sequence[str], shapes: Sequence[Sequence[int]], out: str
) -> dict[str, Factors]:
    """Make a factor for each letter of an Einstein sum. Letters that are not in the output are summed over."""
    found: dict[str, Factors] = {}
    for word, shape in zip(words, shapes, strict=True):
        for letter, n in zip(word, shape, strict=True):
            if not found.get(letter):
                found[letter] = call.factor(n, Kind.PASS if letter in out else Kind.SUM)
    return found


def _spelled(word: str, letters: dict[str, Factors]) -> Dims:
    return tuple(letters[letter] for letter in word)


def _product(first: str, second: str, out: str) -> Callable[[RuleBuilder], Rule]:
    def formula(call: RuleBuilder) -> Rule:
        letters = _letters(call, (first, second), [t.shape for t in call.inputs], out)
        return call.rule([_spelled(w, letters) for w in (first, second)], [_spelled(out, letters)])

    return formula


def _product_with_bias(first: str, second: str, out: str) -> Callable[[RuleBuilder], Rule | None]:
    def formula(call: RuleBuilder) -> Rule | None:
        bias, *factors = call.inputs
        letters = _letters(call, (first, second), [t.shape for t in factors], out)
        for letter, found in letters.items():
            if letter not in out:
                call.becomes(found, Kind.BLOCK)  # else every slice would add the bias
        dims = _spelled(out, letters)
        added = broadcast(dims, call.outputs[0].shape, bias.shape)
        # A bias that is not broadcast to the output: nothing is known of such a call.
        if added is None:
            return None
        return call.rule([added, _spelled(first, letters), _spelled(second, letters)], [dims])

    return formula


register("mm")(_product("ik", "kj", "ij"))
register("bmm")(_product("bik", "bkj", "bij"))
register("mv")(_product("ik", "k", "i"))
register("dot", "vdot")(_product("k", "k", ""))
register("addmm", "_addmm_activation")(_product_with_bias("ik", "kj", "ij"))
register("baddbmm")(_product_with_bias("bik", "bkj", "bij"))
register("addmv")(_product_with_bias("ik", "k", "i"))


@register("_grouped_mm")
def _grouped_product(call: RuleBuilder) -> Rule | None:
    """Multiply groups of rows, of columns, or of the summed dimension; ``offs`` says where each group ends.

    The grouped dimension must be whole, since the offsets count from its beginning.
    """
    x, y = call.inputs[:2]
    if call["bias"] is not None:
        return None
    # An operand of three dimensions has the groups as its first, ``e``. In an operand of two dimensions, groups follow
    # each other in the dimension that ``grouped`` names below.
    words = {(3, 3): "eik ekj eij", (2, 3): "ik ekj ij", (3, 2): "eik kj ij", (2, 2): "ik kj eij"}
    first, second, out = words[len(x.shape), len(y.shape)].split()
    letters = _letters(call, (first, second), (x.shape, y.shape), out)
    offsets = []
    if call["offs"] is not None:
        grouped = {(2, 3): "i", (3, 2): "j", (2, 2): "k"}[len(x.shape), len(y.shape)]
        # Both operands are matrices: only the output has a dimension of groups, one for each offset.
        if "e" not in letters:
            letters["e"] = call.factor(call["offs"].shape[0])
        for letter in ("e", grouped):
            call.becomes(letters[letter], Kind.BLOCK)
        offsets = [(letters["e"],)]
    return call.rule(
        [_spelled(first, letters), _spelled(second, letters), *offsets], [_spelled(out, letters)]
    )
