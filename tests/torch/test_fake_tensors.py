"""What the short ways to a fake tensor, and past a fake kernel, must have in common with torch's own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sacplan._torch import fake_kernels as _fake_kernels
from sacplan._torch.fake_kernels import fake_kernels
from sacplan._torch.fake_tensors import CPU, fake_empty_strided

N = 17  # tensors of a list, more than FakeTensorMode's cache is asked about


def test_a_copied_fake_tensor_has_all_that_torchs_own_has() -> None:
    mode = FakeTensorMode()
    mode._allow_unsafe_data_ptr_access = False  # by default there is a warning, once for the process
    own = FakeTensor(mode, torch.empty(3, 2, dtype=torch.bfloat16, device="meta"), CPU)
    # The second is the first one that is copied.
    made = [fake_empty_strided(mode, (3, 2), (2, 1), torch.bfloat16) for _ in range(3)]
    for each in made:
        assert vars(each) == vars(own)
        assert type(each) is FakeTensor
        assert not each.requires_grad
        assert (each.device, each.dtype) == (CPU, own.dtype)
        assert (each.shape, each.stride()) == (own.shape, own.stride())
        assert torch._C._dispatch_keys(each) == torch._C._dispatch_keys(own)
        with pytest.raises(RuntimeError):
            each.data_ptr()
    assert made[1].untyped_storage()._cdata != made[2].untyped_storage()._cdata
    with mode:
        assert (made[1] + made[2]).shape == (3, 2)


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


def test_an_op_that_only_writes_a_long_list_is_not_torchs_to_answer(asked: list[str]) -> None:
    versions = []
    with FakeTensorMode(), fake_kernels({torch.ops.aten.sin.default: lambda *_: NotImplemented}):
        # Torch is asked about a short list.
        for n in (N, 2):
            a, b, c = (each[:n] for each in _lists(torch.float32, (2, 3), (2, 3), (2, 3)))
            torch._foreach_mul_(a, 0.9)
            torch._foreach_lerp_(a, b, 0.1)
            torch._foreach_addcmul_(a, b, c, value=0.5)
            torch._foreach_addcdiv_(a, b, c, [0.5] * n)
            versions.append(a[0]._version)
            assert len(asked) == (0 if n == N else 4)
        # One that makes tensors has to be asked for their layouts.
        assert torch._foreach_sqrt(_lists(torch.float32, (2, 3))[0])[0].shape == (2, 3)
    assert asked[4:] == ["aten._foreach_sqrt.default"]
    assert versions[0] == versions[1]


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
