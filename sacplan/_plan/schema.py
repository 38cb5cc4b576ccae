"""The JSON schema of plan files, from the types that read them: ``python -m sacplan._plan.schema`` writes it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import msgspec

from sacplan._plan.plan import SCHEMA_VERSION, PlanFile
from sacplan._program import files

PATH = Path(__file__).parents[1] / "schemas" / f"plan-{SCHEMA_VERSION}.json"


def plan_schema() -> dict[str, Any]:
    """As JSON-ready values."""
    schema = msgspec.json.schema(PlanFile)
    for definition in schema["$defs"].values():
        definition["description"] = inspect.cleandoc(definition["description"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A plan of sacplan", **schema}


if __name__ == "__main__":
    files.write(PATH, plan_schema())
