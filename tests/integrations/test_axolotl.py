"""The plugin, registered as axolotl registers it, on a Trainer with the checkpointing that its configurations ask for.

Needs axolotl's own plugin manager; axolotl as a whole needs Triton.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("transformers")
base = pytest.importorskip("axolotl.integrations.base")

from sacplan.integrations.transformers import profile_trainer  # noqa: E402
from tests.support.steps import bit_equal  # noqa: E402
from tests.support.trainers import trainer  # noqa: E402


def test_a_plan_from_yaml(tmp_path: Path) -> None:
    expected = trainer(tmp_path)
    expected.train()
    planned = trainer(tmp_path, gradient_checkpointing=True)
    budget = int(0.7 * profile_trainer(planned, device="cpu").peak_bytes)
    written = f"""
    plugins: [sacplan.integrations.axolotl.SacplanPlugin]
    gradient_checkpointing: true
    sacplan: {{budget: {budget}B, device: cpu}}
    """
    config = base.DictDefault(yaml.safe_load(written))
    manager = base.PluginManager.get_instance()
    for name in config.plugins:
        manager.register(name)
    assert manager.get_input_args() == ["sacplan.integrations.axolotl.SacplanArgs"]
    (callback,) = manager.add_callbacks_post_trainer(config, planned)
    planned.add_callback(callback)
    planned.train()
    assert bit_equal(list(planned.model.parameters()), list(expected.model.parameters()))
    assert callback.plan.budget_bytes == budget
    assert callback.peaks_bytes[1] == pytest.approx(callback.plan.peak_bytes, abs=256)
    assert callback.plan.peak_bytes <= budget
