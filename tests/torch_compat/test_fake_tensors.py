"""What the short ways to a fake tensor, and past a fake kernel, must have in common with torch's own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sacplan.torch_compat import fake_kernels as _fake_kernels
from sacplan.torch_compat.fake_kernels import fake_kernels
from sacplan.torch_compat.fake_tensors import fake_empty_strided

N = 17  # tensors of a list, more than FakeTensorMode's cache is asked about


def test_a_mode_is_gone_with_its_last_tensor() -> None:
    mode = FakeTensorMode()
    made: list[Any] = [fake_empty_strided(mode, (2,), (1,), torch.float32) for _ in range(2)]
    gone = weakref.ref(mode)
    gc.disable()
    try:
        made.clear()
        del mode
        assert gone() is None
    finally:
        gc.enable()


def _lists(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[list[torch.Tensor]]:
    return [[torch.empty(shape, dtype=dtype) for _ in range(N)] for shape in shapes]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The foreach ops that torch's own FakeTensorMode was asked about."""
    found: list[str] = []
    own = _fake_kernels._torchs_own

    def noted(mode: FakeTensorMode, func: Any, *args: Any) -> Any:
        if "_foreach_" in str(func):
            found.append(str(func))
        return own(mode, func, *args)

    monkeypatch.setattr(_fake_kernels, "_torchs_own", noted)
    return found


@pytest.mark.parametrize(
    ("to", "of"), [((2, 3), (3, 2)), ((3,), (2, 3))], ids=["other shapes", "broadcast the wrong way"]
)
def test_its_errors_stay_torchs_own(to: tuple[int, ...], of: tuple[int, ...]) -> None:
    with FakeTensorMode(), fake_kernels({torch.ops.aten.sin.default: lambda *_: NotImplemented}):
        into, other = _lists(torch.float32, to, of)
        with pytest.raises(RuntimeError):
            torch._foreach_add_(into, other)
        with pytest.raises(RuntimeError):
            torch._foreach_add_(into, into[:-1])


def test_a_known_value_is_never_out_of_date() -> None:
    with FakeTensorMode(), fake_kernels({torch.ops.aten.sin.default: lambda *_: NotImplemented}):
        steps: list[Any] = [torch.tensor(0.0) for _ in range(N)]
        assert all(t.constant is not None for t in steps)
        torch._foreach_add_(steps, 1.0)
        assert all(t.constant is None or t.constant.tolist() == 1.0 for t in steps)
