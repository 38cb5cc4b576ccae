"""What an ``hf:`` model and batch were made with, kept in the file of a profile or a plan; verify makes them again.

origin = Origin.of(target)
save(plan, Path("plan.json"), origin)
origin_in(Path("plan.json"), "plan") == origin
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sacplan._cli.hf import HfOptions
from sacplan._cli.options import Dtype, Optimizer

if TYPE_CHECKING:
    from sacplan import Plan, Profile
    from sacplan._cli.targets import Target

# beside the model and the batch that a file is for; who reads a fingerprint takes what it knows and leaves the rest
_SECTION, _KEY = "fingerprint", "target"


@dataclass(frozen=True, slots=True)
class Origin:
    """An ``hf:`` target.

    Attributes:
        name: as it was written, ``hf:gpt2``.
        options: what was chosen for it, all of it.
    """

    name: str
    options: HfOptions

    @classmethod
    def of(cls, target: Target, **chosen: Any) -> Origin | None:
        """Of a target as it was loaded; None where the target's own code decides. ``chosen`` goes before its facts."""
        if not target.facts:
            return None
        facts = {**target.facts, **chosen}
        return cls(target.name, HfOptions(**{k: facts.get(k) for k in asdict(HfOptions())}))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"name": self.name} | {k: v for k, v in asdict(self.options).items() if v is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Origin:
        """The inverse of ``to_dict``; a ``ValueError`` where a choice is none of ours."""
        batch, seq, dtype, optimizer = (data.get(k) for k in ("batch", "seq", "dtype", "optimizer"))
        options = HfOptions(
            batch=None if batch is None else int(batch),
            seq=None if seq is None else int(seq),
            dtype=None if dtype is None else Dtype(dtype).value,
            optimizer=None if optimizer is None else Optimizer(optimizer).value,
            attn=data.get("attn"),
        )
        return cls(data["name"], options)


def save(made: Plan | Profile, path: Path, origin: Origin | None) -> None:
    """Save a profile or a plan, with what made the model and the batch that it is of."""
    from sacplan._plan.plan import Plan
    from sacplan._program.files import write_json

    made.save(path)
    if origin is not None:
        data = _read(path, "plan" if isinstance(made, Plan) else "profile")
        data[_SECTION][_KEY] = origin.to_dict()
        write_json(path, data)


def origin_in(path: Path, what: Literal["plan", "profile"]) -> Origin | None:
    """What a file says about its target; None where it was not an ``hf:`` one, or the file is the library's."""
    found = _read(path, what)[_SECTION].get(_KEY)
    return None if found is None else Origin.from_dict(found)


def _read(path: Path, what: Literal["plan", "profile"]) -> dict[str, Any]:
    from sacplan._plan import plan
    from sacplan._profile import profile
    from sacplan._program.files import read_json

    return read_json(path, what, (plan if what == "plan" else profile).SCHEMA_VERSION)
