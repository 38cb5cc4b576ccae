"""Which sharding does the search find for small models, beside those that people use by name?

    python -m benchmarks.placements [--cases mlp llama gpt2] [--meshes 4 2x2 8]

Cases: ColossalAI's MLP (1024-4096-1024, 512 tokens), and a block of Llama-3-8B and of GPT-2, in bfloat16 with fused
AdamW, on the meta device. Everything is predicted for an H100 without the fixed workspaces of its libraries. Time and
peak are those of the program of one rank, rewritten for a sharding: the same terms for all.

A row is a limit of a case on a mesh. It says what the search finds under the limit, the fastest sharding with a name
that holds it, and the fastest plan of each, recomputation included. Limits are the peaks of the shardings with names,
so that at each of them at least one holds, and two between the smallest of these and the smallest that the search
finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import nn

import sacplan
from benchmarks.harness.command import Parser
from benchmarks.harness.plans import plan_or_least, timed
from benchmarks.harness.results import MIB, Row, write_results
from benchmarks.models.cases import fused_adamw
from sacplan._placing.shardings import searched
from sacplan._plan.meshes import Spread, spreads
from sacplan._shard.mesh import Mesh
from sacplan._shard.sharding import Sharding

DEVICE = "h100 without workspaces"
MESHES = {"4": {"tp": 4}, "2x2": {"dp": 2, "tp": 2}, "8": {"tp": 8}}
_WITHIN = 1e-6  # what counts as equal time


class Mlp(nn.Module):
    """ColossalAI's: two linear layers with GELU between."""

    def __init__(self, width: int = 1024, inner: int = 4096) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class LlamaBlock(nn.Module):
    """A layer of Llama-3-8B, on hidden states."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8
        )
        config._attn_implementation = "sdpa"
        module = transformers.models.llama.modeling_llama
        self.rotary = module.LlamaRotaryEmbedding(config)
        self.layer = module.LlamaDecoderLayer(config, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1], device=x.device)[None]
        found = self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        return found[0] if isinstance(found, tuple) else found


class Gpt2Block(nn.Module):
    """A layer of GPT-2, on hidden states."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0)
        config._attn_implementation = "sdpa"
        self.layer = transformers.models.gpt2.modeling_gpt2.GPT2Block(config, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.layer(x)
        return found[0] if isinstance(found, tuple) else found


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a loss of hidden states."""
    return model(x).float().square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (512, 1024)),
    "llama": (LlamaBlock, (8, 2048, 4096)),
    "gpt2": (Gpt2Block, (8, 1024, 768)),
}
"""Model, shape of the batch."""

GRIDS = {"mlp": ("4", "2x2"), "llama": ("4", "2x2", "8"), "gpt2": ("4", "2x2", "8")}


def profiled(name: str) -> sacplan.Profile:
    """Profile the whole model on one device. ColossalAI's MLP has no optimizer."""
    make, shape = CASES[name]
    with torch.device("meta"):
        model, batch = make().bfloat16(), torch.empty(shape, dtype=torch.bfloat16)
    optimizer = None if name == "mlp" else fused_adamw
    return sacplan.profile(model, batch, mean_square, optimizer, device=DEVICE)


# --- one mesh -------------------------------------------------------------------------------------------------


def planned_ms(way: Spread, limit: int) -> float:
    """Return the time of a step with recomputation that holds a limit; infinite if none does."""
    plan, _ = plan_or_least(way.profile, limit, techniques=("recompute",))
    return math.inf if plan is None else plan.step_ms + plan.recompute_ms


def as_row(way: Spread) -> dict[str, Any]:
    """Return time and peak of a sharding."""
    return {"name": way.name, "ms": way.profile.step_ms, "peak_bytes": way.profile.peak_bytes}


def described(sharding: Sharding) -> dict[str, Any]:
    """Describe a sharding: where parameters are placed, and how ops run."""
    return {
        "homes": dict(sharding.homes),
        "places": [f"{p.unit} {p.op} {p.occurrence}: {'; '.join(p.inputs)}" for p in sharding.places],
    }


def limits_of(named: Sequence[Spread], smallest: int) -> list[int]:
    """Return the limits in bytes; 0 means no limit."""
    peaks = sorted({way.profile.peak_bytes for way in named}, reverse=True)
    lowest = peaks[-1]
    between = [smallest + (lowest - smallest) * share // 4 for share in (3, 1)] if smallest < lowest else []
    return [0, *peaks, *between]


def looked(profile: sacplan.Profile, mesh: Mesh) -> Iterator[Row]:
    """Yield a row for each limit."""
    named = list(spreads(profile, mesh))
    least = Spread("search", profile, searched(profile, mesh, 1).sharding)
    for limit in limits_of(named, least.profile.peak_bytes):
        found, seconds = timed(lambda limit=limit: searched(profile, mesh, limit))
        way = Spread("search", profile, found.sharding)
        row = row_of(way, named, limit) | {"seconds": seconds, "plan": best_plan(profile, mesh, limit)}
        yield row | {"is_best": is_best(row)} | described(way.sharding)


def row_of(way: Spread, named: Sequence[Spread], limit: int) -> Row:
    """Return what the search found, beside what has a name."""
    same = [one.name for one in named if repr(one.sharding) == repr(way.sharding)]
    holding = [one for one in named if not limit or one.profile.peak_bytes <= limit]
    best = min(holding, key=lambda one: one.profile.step_ms, default=None)
    holds = not limit or way.profile.peak_bytes <= limit
    row = {
        "limit_bytes": limit,
        "search": as_row(way) | {"holds": holds, "same_as": same},
        "named": [as_row(one) for one in named],
        "best_named": best.name if best else "",
        "as_fast": holds and (best is None or way.profile.step_ms <= best.profile.step_ms * (1 + _WITHIN)),
    }
    plans = {one.name: planned_ms(one, limit or one.profile.peak_bytes) for one in (way, *named)}
    row["planned_ms"] = {name: ms for name, ms in plans.items() if ms < math.inf}
    return row


def best_plan(profile: sacplan.Profile, mesh: Mesh, limit: int) -> dict[str, Any]:
    """Return the sharding that ``sacplan.plan`` takes, with its time and peak."""
    budget, techniques = limit or profile.peak_bytes * 2, ("shard", "recompute")
    plan, peak_bytes = plan_or_least(profile, budget, mesh=dict(mesh.axes), techniques=techniques)
    if plan is None:
        return {"sharding": "", "ms": None, "peak_bytes": peak_bytes}
    return {
        "sharding": plan.provenance.options["sharding"],
        "ms": plan.step_ms + plan.recompute_ms,
        "peak_bytes": peak_bytes,
    }


def is_best(row: Row) -> bool:
    """Whether the plan is as fast as that on any sharding of the row."""
    times = row["planned_ms"].values()
    if row["plan"]["ms"] is None:  # no plan is right only where no sharding has one
        return not times
    return row["plan"]["ms"] <= min(times, default=math.inf) * (1 + _WITHIN)


def line_of(row: Row) -> str:
    """Write a row."""
    limit, found = row["limit_bytes"], row["search"]
    best = next((one for one in row["named"] if one["name"] == row["best_named"]), None)
    words = [
        f"{'no limit' if not limit else f'{limit / MIB:.1f} MiB':>11}: search {found['ms']:.4f} ms",
        f"{found['peak_bytes'] / MIB:.1f} MiB{'' if found['holds'] else ' (over)'}",
    ]
    if found["same_as"]:
        words.append(f"= {found['same_as'][0]}")
    if best:
        words.append(f"best named {best['name']} {best['ms']:.4f} ms {best['peak_bytes'] / MIB:.1f} MiB")
    if row["plan"]["ms"] is not None:
        words.append(f"plan {row['plan']['sharding']} {row['plan']['ms']:.4f} ms")
    notes = ("" if row["as_fast"] else "  (the search alone is slower, or over)") + (
        "" if row["is_best"] else "  NOT THE BEST"
    )
    return "; ".join(words) + notes


def main() -> None:
    parser = Parser(__doc__, "placements.json")
    parser.choice("--cases", CASES)
    parser.choice("--meshes", MESHES)
    arguments = parser.begin(silence=True)
    rows = []
    for name in arguments.cases:
        profile = profiled(name)
        for grid in (g for g in GRIDS[name] if g in arguments.meshes):
            mesh = Mesh.of(MESHES[grid])
            print(
                f"{name} on {mesh}; one device: {profile.step_ms:.4f} ms, {profile.peak_bytes / MIB:.1f} MiB"
            )
            for row in looked(profile, mesh):
                row = {"case": name, "mesh": grid, **row}
                print(line_of(row), flush=True)
                rows.append(row)
            write_results(arguments.json, rows, device=DEVICE)


if __name__ == "__main__":
    main()
