"""``benchmarks.published``: what others have measured on GPUs, beside what is predicted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.models import published_networks as networks
from benchmarks.published import published_rows, rows_of


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ao-vitg-none", "ao-vitg-offload", "ao-vitg-offload_gradients"])
def test_an_optimizer_on_the_host_is_predicted_to_twelve_thousandths(name: str) -> None:
    (row,) = rows_of(name, published_rows()[name])
    assert abs(row["error"]) < 12e-3


@pytest.mark.parametrize("name", ["mingpt-nano", "pt-74443-pow2"])
def test_small_steps_are_predicted_to_the_byte(name: str) -> None:
    rows = rows_of(name, published_rows()[name])
    assert rows
    assert all(row["predicted_bytes"] == row["published_bytes"] for row in rows)


@pytest.mark.slow
def test_gpt2_xl_is_predicted_to_a_hundredth_of_a_percent() -> None:
    for row in rows_of("mingpt-xl", published_rows()["mingpt-xl"]):
        assert abs(row["error"]) < 1e-4


@pytest.mark.parametrize(
    ("make", "parameters"),
    [
        (networks.resnet101, 44_549_160),
        (lambda: networks.Llama(networks.LLAMA_2_7B), 6_738_415_616),
        (lambda: networks.Llama(networks.LLAMA_3_8B), 8_030_261_248),
        (lambda: networks.Llama(networks.LLAMA_32_3B), 3_212_749_824),
        (lambda: networks.Nanochat(20, 1280, 10, 65536, 2048), 560_988_160),
        # DINOv2's own, for images of 518 x 518, less its mask token and 1,113 positions, with a classifier.
        (lambda: networks.vit_giant(45), 1_136_480_768 - 1114 * 1536 + 45 * 1537),
    ],
)
def test_models_have_the_published_number_of_parameters(make: Any, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in make().parameters()) == parameters
