"""The solver that CONTRIBUTING.md shows makes plans."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import sacplan
from sacplan.solvers.greedy import Greedy
from sacplan.solvers.problem import Problem, Solution
from tests.zoo import language_models as models

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_solver_of_ten_lines_plans() -> None:
    names: dict[str, Any] = {
        "dataclass": dataclass,
        "Problem": Problem,
        "Solution": Solution,
        "Greedy": Greedy,
    }
    exec("from __future__ import annotations\n" + next(b for b in BLOCKS if "CheapestFirst" in b), names)
    torch.manual_seed(0)
    profile = sacplan.profile(models.LM(), torch.randint(0, 128, (4, 32)), device="cpu")
    smallest = sacplan.plan(profile, "smallest", solver="greedy").peak_bytes
    plan = sacplan.plan(profile, f"{(smallest + profile.peak_bytes) // 2}B", solver=names["CheapestFirst"]())
    assert plan.peak_bytes <= (smallest + profile.peak_bytes) // 2
    assert plan.solver == "cheapest-first"
