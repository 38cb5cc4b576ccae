"""What an axis of a mesh is for: restrictions under which the search finds what people name.

Data parallelism cuts what comes from the batch and uses parameters whole; at home they may be cut (``fsdp``) or not
(``ddp``). Both are run by sacplan, op by op: only where parameters lie is as under PyTorch's FSDP2 and DDP. Tensor
parallelism cuts parameters, and what is computed with them. Under both, nothing that comes whole is cut in between:
cuts come in with the batch, or with a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sacplan._placing.options import Allowed, StrategyOffer


def _is_new(offer: StrategyOffer, cuts: Sequence[int]) -> bool:
    """Whether none of these arguments is cut as its producers may have left it."""
    made, inputs = offer.made, offer.strategy.inputs
    return not any((known := made[i]) is not None and inputs[i] in known for i in cuts)


def data_parallel(offer: StrategyOffer) -> bool:
    """Data parallelism; where parameters are at home is free."""
    if offer.subject.is_parameter:
        return True
    cuts = [i for i, placement in enumerate(offer.strategy.inputs) if placement.is_cut]
    if any(offer.weights[i] for i in cuts):
        return False
    from_batch = [offer.strategy.inputs[i] for i in cuts if offer.made[i] is None]
    comes_in = any(p.dim == 0 and p.outer in (1, *offer.nested) for p in from_batch)
    return not cuts or comes_in or not _is_new(offer, cuts)


def replicas(offer: StrategyOffer) -> bool:
    """``ddp``: data parallelism with whole parameters."""
    if offer.subject.is_parameter:
        return not offer.strategy.outputs[0].is_cut
    return data_parallel(offer)


def fully_sharded(offer: StrategyOffer) -> bool:
    """``fsdp``: data parallelism with parameters cut along their first dimension where that is possible."""
    if offer.subject.is_parameter:
        return offer.strategy.outputs[0].is_cut and offer.strategy.outputs[0].dim == 0
    return data_parallel(offer)


def tensor_parallel(offer: StrategyOffer) -> bool:
    """Parameters are cut, and what is computed with them; batch and sequence are whole: Megatron."""
    if offer.subject.is_parameter:
        return True
    cuts = [i for i, placement in enumerate(offer.strategy.inputs) if placement.is_cut]
    computed = [i for i in cuts if offer.made[i] is not None and not offer.weights[i]]
    if computed:
        return not _is_new(offer, computed)
    return not cuts or any(offer.weights[i] for i in cuts)


def megatron(offer: StrategyOffer) -> bool:
    """Tensor parallelism in which all matrices are cut that can be."""
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
"""By name."""
