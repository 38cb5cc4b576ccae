"""The settings of the process that decide which kernel computes an op: read them, and put them back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch


def _switch(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")


def _precision(backend: str, op: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    return functools.partial(get, backend, op), functools.partial(put, backend, op)


# Settings that decide which kernel computes a matmul or a convolution, and with which bits.
_KERNEL_SETTINGS = (
    *map(_switch, ("mkldnn_enabled", "mkldnn_deterministic")),
    *map(_switch, ("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")),
    _precision("mkldnn", "matmul"),
    _precision("mkldnn", "conv"),
    _precision("cuda", "matmul"),
    _precision("cuda", "conv"),
)

_GET_KERNEL_SETTINGS = tuple(get for get, _ in _KERNEL_SETTINGS)


def kernel_settings() -> tuple[Any, ...]:
    """Return the values of the settings, in the order in which ``set_kernel_settings`` takes them."""
    return tuple([get() for get in _GET_KERNEL_SETTINGS])


def set_kernel_settings(values: Sequence[Any]) -> None:
    """Set the settings that differ from ``values``."""
    for (get, put), value in zip(_KERNEL_SETTINGS, values, strict=True):
        if get() != value:
            put(value)
