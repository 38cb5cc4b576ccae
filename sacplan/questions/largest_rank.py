"""Which of several ranks must have the most memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from sacplan.core.arguments import checked
from sacplan.device.devices import DEFAULT_DEVICE, DeviceSpec
from sacplan.distributed.sharding.process_groups import ranks
from sacplan.errors import PlanError
from sacplan.profiling.profile import Profile


@checked(PlanError, "device")
def largest_rank(
    world_size: int,
    profile_rank: Callable[[int], Profile],
    device: str | DeviceSpec | torch.device = DEFAULT_DEVICE,
    among: Iterable[int] | None = None,
) -> tuple[int, Profile]:
    """Return the rank whose step has the largest peak, and its profile: what each device must have.

        rank, profile = sacplan.largest_rank(8, stage_of_rank, "h100", among=(0, 4))

    Args:
        world_size: the number of all ranks.
        profile_rank: profiles the step of the rank of this number; called inside ``sacplan.ranks``.
        device: what a rank runs on.
        among: the ranks to record, if others are like one of these: of each stage of a pipeline the first. Of the
            shards that ``fully_shard`` makes, those of rank 0 are the largest. Default: all.

    Raises:
        PlanError: there is a process group already, no such rank, none to record, or no profile returned.
    """
    found: dict[int, Profile] = {}
    for rank in range(world_size) if among is None else among:
        with ranks(world_size, rank, device):
            found[rank] = profile_rank(rank)
    if not found or not all(isinstance(one, Profile) for one in found.values()):
        raise PlanError(
            "profile_rank must return what sacplan.profile returns, and among name a rank or more."
        )
    return max(found.items(), key=lambda one: one[1].peak_bytes)
