"""The JSON schemas of plan, profile and device files, made from the types that read the files.

``python -m sacplan.planning.schema`` writes them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sacplan.core import files
from sacplan.device import devices
from sacplan.device.files import SCHEMA_VERSION as DEVICE_VERSION
from sacplan.planning.plan import SCHEMA_VERSION, PlanFile
from sacplan.profiling import files as profile_files

PATH = files.schema_path("plan", SCHEMA_VERSION)


def schemas() -> dict[Path, dict[str, Any]]:
    """Return all schemas by their path in the package."""
    return {
        PATH: files.schema_of(PlanFile, "A plan of sacplan"),
        files.schema_path("profile", profile_files.SCHEMA_VERSION): profile_files.schema(),
        files.schema_path("device", DEVICE_VERSION): devices.schema(),
    }


# The tests compare the files in the package with what this writes.
if __name__ == "__main__":
    for path, schema in schemas().items():
        files.write(path, schema)
