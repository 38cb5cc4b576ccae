"""Roles of an axis: restrictions under which the search finds the parallelism that people know by name.

A role is a predicate on one strategy of one class (``Allowed``). There are two kinds:

- Data parallelism: a tensor of the batch may be cut along dimension 0, and activations that follow from it. An op
  never reads a parameter cut. Between ops a parameter may be sharded (``fsdp``) or replicated (``ddp``). sacplan runs
  both op by op: it shares with PyTorch's FSDP2 and DDP where parameters lie, and no more.
- Tensor parallelism: an op may read a parameter cut, and activations that follow from that. The batch stays whole.

What keeps a role from becoming something else is that a cut has to come from somewhere. Once an activation is
replicated, no op may cut it anew (``_is_new``): sequence parallelism inside of data parallelism would be such a cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sacplan._placing.options import Allowed, StrategyOffer


def _is_new(offer: StrategyOffer, cuts: Sequence[int]) -> bool:
    """Whether the op would cut these arguments itself: no producer can leave any of them so."""
    # None in ``made``: every rank has all of it, such as the batch. That is no producer.
    made, inputs = offer.made, offer.strategy.inputs
    return not any((known := made[i]) is not None and inputs[i] in known for i in cuts)


def data_parallel(offer: StrategyOffer) -> bool:
    """Allow data parallelism, with parameters sharded or not."""
    if offer.subject.is_parameter:
        # A parameter may be sharded or not: what runs with it is restricted below.
        return True
    cuts = [i for i, placement in enumerate(offer.strategy.inputs) if placement.is_cut]
    # Otherwise this would be tensor parallelism.
    if any(offer.weights[i] for i in cuts):  # each op gathers its parameters
        return False
    # Cut are: nothing; or the rows of the batch, within what slower axes may have cut; or what was cut before.
    from_batch = [offer.strategy.inputs[i] for i in cuts if offer.made[i] is None]
    comes_in = any(p.dim == 0 and p.outer in (1, *offer.nested) for p in from_batch)
    return not cuts or comes_in or not _is_new(offer, cuts)


def replicas(offer: StrategyOffer) -> bool:
    """Allow ``ddp``: data parallelism with replicated parameters."""
    if offer.subject.is_parameter:
        return not offer.strategy.outputs[0].is_cut
    return data_parallel(offer)


def fully_sharded(offer: StrategyOffer) -> bool:
    """Allow ``fsdp``: data parallelism with parameters sharded along dimension 0.

    A parameter whose first dimension the ranks do not divide has no strategy that is allowed, and is replicated.
    """
    if offer.subject.is_parameter:
        return offer.strategy.outputs[0].is_cut and offer.strategy.outputs[0].dim == 0
    return data_parallel(offer)


def tensor_parallel(offer: StrategyOffer) -> bool:
    """Allow tensor parallelism: parameters are cut, and what is computed with them; batch and sequence are not."""
    if offer.subject.is_parameter:
        return True
    cuts = [i for i, placement in enumerate(offer.strategy.inputs) if placement.is_cut]
    # Activations may stay cut. Other cuts must be of parameters; what comes from the batch follows these.
    computed = [i for i in cuts if offer.made[i] is not None and not offer.weights[i]]
    # There is a cut of an activation: allowed if it comes from a producer.
    if computed:
        return not _is_new(offer, computed)
    # Nothing cut; or a parameter read cut, and with it what comes from the batch. A cut of the batch alone
    # would be data parallelism.
    return not cuts or any(offer.weights[i] for i in cuts)


def megatron(offer: StrategyOffer) -> bool:
    """Allow tensor parallelism in which every matrix is cut that can be, as in Megatron."""
    # Vectors, such as biases and norms, may be replicated.
    if offer.subject.is_parameter and len(offer.subject.shapes[0]) > 1:
        return offer.strategy.outputs[0].is_cut
    return tensor_parallel(offer)


ROLES: Mapping[str, Allowed] = {
    "data": data_parallel,
    "ddp": replicas,
    "fsdp": fully_sharded,
    "tensor": tensor_parallel,
    "megatron": megatron,
}
"""Roles by the names that users give."""
