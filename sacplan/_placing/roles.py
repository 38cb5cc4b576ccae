"""What an axis of a mesh is for: restrictions under which the search finds what people name.

Data parallelism cuts what comes from the batch and uses parameters whole; at home they may be cut (``fully_shard``) or
not (``DistributedDataParallel``). Tensor parallelism cuts parameters, and what is computed with them. Under both,
nothing that comes whole is cut in between: cuts come in with the batch, or with a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

from sacplan._placing.options import Allowed, Offer


def _stays(offer: Offer, i: int) -> bool:
    """Whether an argument is whole, or is cut as its producers may have left it."""
    placement, made = offer.strategy.inputs[i], offer.made[i]
    return not placement.is_cut or (made is not None and placement in made)


def data_parallel(offer: Offer) -> bool:
    """Data parallelism; where parameters are at home is free."""
    if offer.subject.is_parameter:
        return True
    for i, placement in enumerate(offer.strategy.inputs):
        if not placement.is_cut:
            continue
        from_batch = offer.made[i] is None and placement.dim == 0 and placement.outer in (1, *offer.nested)
        if offer.weights[i] or not (from_batch or _stays(offer, i)):
            return False
    return True


def replicas(offer: Offer) -> bool:
    """Data parallelism with whole parameters: ``DistributedDataParallel``."""
    if offer.subject.is_parameter:
        return not offer.strategy.outputs[0].is_cut
    return data_parallel(offer)


def fully_sharded(offer: Offer) -> bool:
    """Data parallelism with parameters cut along their first dimension where that is possible: ``fully_shard``."""
    if offer.subject.is_parameter:
        return offer.strategy.outputs[0].is_cut and offer.strategy.outputs[0].dim == 0
    return data_parallel(offer)


def tensor_parallel(offer: Offer) -> bool:
    """Parameters are cut, and what is computed with them; batch and sequence are whole: Megatron."""
    if offer.subject.is_parameter:
        return True
    cuts = [i for i, placement in enumerate(offer.strategy.inputs) if placement.is_cut]
    placed = [i for i in cuts if offer.made[i] is not None]
    return (not cuts or bool(placed)) and all(offer.weights[i] or _stays(offer, i) for i in placed)


ROLES: Mapping[str, Allowed] = {
    "data": data_parallel,
    "ddp": replicas,
    "fsdp": fully_sharded,
    "tensor": tensor_parallel,
}
"""By name."""
