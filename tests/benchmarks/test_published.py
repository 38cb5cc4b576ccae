"""``benchmarks.published``: what others have measured on GPUs, beside what is predicted."""

from __future__ import annotations

import pytest

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
