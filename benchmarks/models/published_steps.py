"""The whole steps of ``benchmarks/data/peaks.jsonl`` and ``steps.jsonl`` that can be built, by the id of their row.

    step = STEPS["mingpt-nano"]
    profile = step.profile()

Rows of the data that are not here say why, under ``not_built``.
"""

from __future__ import annotations

from benchmarks.models.published_hf import TRANSFORMERS
from benchmarks.models.published_language import LANGUAGE
from benchmarks.models.published_prime_rl import PRIME_RL
from benchmarks.models.published_step import Step
from benchmarks.models.published_times import TIMED
from benchmarks.models.published_torchtitan import TORCHTITAN
from benchmarks.models.published_vision import VISION

STEPS: dict[str, Step] = LANGUAGE | TORCHTITAN | PRIME_RL | TRANSFORMERS | VISION | TIMED
