"""The solver that CONTRIBUTING.md shows makes plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import sacplan
from sacplan.solvers.greedy import Greedy
from sacplan.solvers.problem import Problem, Solution
from tests.project.test_docs import blocks_of
from tests.zoo import language_models as models


def test_the_solver_of_ten_lines_plans() -> None:
    (code,) = (block.code for block in blocks_of("../CONTRIBUTING.md") if "CheapestFirst" in block.code)
    names: dict[str, Any] = {each.__name__: each for each in (dataclass, Problem, Solution, Greedy)}
    exec(f"from __future__ import annotations\n{code}", names)
    torch.manual_seed(0)
    profile = sacplan.profile(models.LM(), torch.randint(0, 128, (4, 32)), device="cpu")
    smallest = sacplan.plan(profile, "smallest", solver="greedy").peak_bytes
    plan = sacplan.plan(profile, f"{(smallest + profile.peak_bytes) // 2}B", solver=names["CheapestFirst"]())
    assert plan.peak_bytes <= (smallest + profile.peak_bytes) // 2
    assert plan.solver == "cheapest-first"
