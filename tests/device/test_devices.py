"""The device table and the look-up by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sacplan.device.devices import (
    DEFAULT_DEVICE,
    DeviceSpec,
    devices,
    known_devices,
    meant_by,
    resolve_device,
    torch_version,
)
from sacplan.errors import DeviceError


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("A100 80GB", "a100-80gb"),
        ("a100_40gb", "a100-40gb"),
        ("RTX4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("H100 SXM", "h100"),
        (" h100-pcie ", "h100-pcie"),
        ("AMD Instinct MI300X", "mi300x"),
        ("CPU", "cpu"),
        ("a100", "a100-80gb"),
        ("A10G", "a10"),
        ("4090", "rtx-4090"),
        ("3090", "rtx-3090"),
    ],
)
def test_names_are_tolerant(written: str, name: str) -> None:
    assert resolve_device(written).name == name


@pytest.mark.parametrize("name", known_devices())
def test_every_row_resolves_and_is_sane(name: str) -> None:
    spec = resolve_device(name)
    assert spec.name == name
    assert spec.source
    assert spec.allocation_round_bytes == (1 if spec.kind == "cpu" else 512)
    assert spec.peak_flops(torch.float16) >= spec.peak_flops(torch.float32) > 0
    assert resolve_device(spec) is spec
    hash(spec)


@pytest.mark.parametrize(
    ("wrong", "near"), [("a100 90gb", "a100-80gb"), ("h1000", "h100"), ("rtx 4080", "rtx-4090")]
)
def test_unknown_name_lists_known_and_near(wrong: str, near: str) -> None:
    with pytest.raises(DeviceError) as caught:
        resolve_device(wrong)
    message = str(caught.value)
    assert wrong in message
    assert "Did you mean" in message
    assert near in message.split("Known:")[0]
    assert all(name in message for name in known_devices())


def test_not_a_device() -> None:
    with pytest.raises(DeviceError, match="unknown device"):
        resolve_device(torch.device("meta"))
    with pytest.raises(DeviceError, match="must be a name"):
        resolve_device(3)  # type: ignore[arg-type]


def test_spec_is_checked() -> None:
    good = {"name": "x", "kind": "cuda", "memory_bytes": 1, "bandwidth_bytes_per_s": 1.0}
    with pytest.raises(DeviceError, match="float32"):
        DeviceSpec(**good, flops={"bfloat16": 1.0})
    with pytest.raises(DeviceError, match="memory_bytes"):
        DeviceSpec(**{**good, "memory_bytes": 0}, flops={"float32": 1.0})
    with pytest.raises(DeviceError, match="compute_efficiency"):
        DeviceSpec(**good, flops={"float32": 1.0}, compute_efficiency=1.5)


def test_without_workspaces() -> None:
    spec = resolve_device("H100 without workspaces")
    assert spec == resolve_device("h100").without_workspaces()
    assert spec.matmul_workspace_bytes == 0
    assert spec.name == "h100 without workspaces"
    assert resolve_device(spec.name) == spec
    assert replace(spec, name="h100", matmul_workspace_bytes=None) == resolve_device("h100")
    with pytest.raises(DeviceError, match="unknown device 'h1000'"):
        resolve_device("h1000 without workspaces")


def test_save_and_load(tmp_path: Path) -> None:
    for name in ("h100", "mi300x", "cpu"):
        spec = replace(resolve_device(name), matmul_workspace_bytes=0)
        for path in (tmp_path / "spec.json", tmp_path / "spec.json.gz"):
            spec.save(path)
            assert DeviceSpec.load(path) == spec
    (tmp_path / "bad.json").write_text('{"what": "device", "schema_version": 2, "spec": {"name": "x"}}')
    with pytest.raises(DeviceError, match="required field `kind`"):
        DeviceSpec.load(tmp_path / "bad.json")
    (tmp_path / "other.json").write_text('{"what": "plan", "schema_version": 1}')
    with pytest.raises(DeviceError, match="not a sacplan device"):
        DeviceSpec.load(tmp_path / "other.json")


# torch's own table; it prints sparse peaks for H100 (it says so) and for L4 (it does not).
TORCH_ROWS = {
    "h100": ("NVIDIA H100", 2, ("bandwidth", "tf32", "bfloat16", "float16")),
    "a100-80gb": ("NVIDIA A100", 1, ("bandwidth", "float32", "tf32")),
    "l4": ("NVIDIA L4", 2, ("tf32", "bfloat16", "float16")),
    "mi300x": ("AMD MI300X", 1, ("bandwidth", "float32", "tf32", "bfloat16", "float16")),
    "mi350x": ("AMD MI350X", 1, ("bandwidth", "float32", "bfloat16", "float16")),
}


@pytest.mark.parametrize("name", TORCH_ROWS)
def test_figures_of_torchs_own_table(name: str) -> None:
    device_info = pytest.importorskip("torch._inductor.analysis.device_info")
    row, sparsity, what = TORCH_ROWS[name]
    info, spec = device_info.lookup_device_info(row), resolve_device(name)
    if info is None:
        pytest.skip(f"this torch has no row for {row}")
    for key in what:
        if key == "bandwidth":
            assert spec.bandwidth_bytes_per_s == info.dram_bw_gbs * 1e9
            continue
        if (name, key) == ("h100", "tf32") and torch_version() < (2, 12):
            continue  # torch's table had the A100's figure
        theirs = info.tops["torch.tf32" if key == "tf32" else getattr(torch, key)] / sparsity
        assert spec.flops[key] == pytest.approx(theirs * 1e12, rel=0.005)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_without_one_suggests_naming_it() -> None:
    with pytest.raises(DeviceError, match="h100"):
        resolve_device("cuda")
    with pytest.raises(DeviceError, match="is_available"):
        resolve_device(torch.device("cuda", 1))


@pytest.mark.parametrize(
    ("board", "capability", "row"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100"),
        ("NVIDIA H100 PCIe", (9, 0), "h100-pcie"),
        ("NVIDIA H200", (9, 0), "h200"),
        ("NVIDIA A100-SXM4-40GB", (8, 0), "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", (8, 0), "a100-80gb"),
        ("Tesla T4", (7, 5), "t4"),
        ("NVIDIA L4", (8, 9), "l4"),
        ("NVIDIA GeForce RTX 4090", (8, 9), "rtx-4090"),
        ("NVIDIA L40S", (8, 9), "l40s"),
        ("NVIDIA RTX A6000", (8, 6), "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), None),
        ("Tesla V100-SXM2-32GB", (7, 0), "v100-32gb"),
        ("NVIDIA GeForce RTX 3090 Ti", (8, 6), None),
        ("NVIDIA Unheard Of", (13, 0), None),
        ("Quadro P4000", (6, 1), None),
    ],
)
def test_the_gpu_that_is_here(
    monkeypatch: pytest.MonkeyPatch, board: str, capability: tuple[int, int], row: str | None
) -> None:
    major, minor = capability
    sizes = {"total_memory": 123 * 2**30, "multi_processor_count": 77}
    props = SimpleNamespace(name=board, major=major, minor=minor, **sizes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props)
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    spec = resolve_device("cuda")
    assert spec.memory_bytes == 123 * 2**30
    assert spec.sm_count == 77
    assert spec.capability == capability
    assert spec.name == (row or board)
    assert resolve_device("cuda:0") == spec
    # A plan for it carries the name, and is verified by it.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: board)
    assert resolve_device(spec.name).name == spec.name


def test_devices_frame() -> None:
    frame = devices()
    assert list(frame.index) == known_devices()
    assert frame.loc["h200", "bandwidth_gb_per_s"] == 4800
    assert frame.loc["h100", "capability"] == "9.0"


@pytest.mark.parametrize(
    ("typed", "n_bytes", "like"),
    [
        ("24GB", 24 * 10**9, "rtx-4090"),
        ("24 gib", 24 * 2**30, "rtx-4090"),
        ("80g", 80 * 10**9, DEFAULT_DEVICE),
    ],
)
def test_a_size_is_a_device(typed: str, n_bytes: int, like: str) -> None:
    found = resolve_device(typed)
    assert found.memory_bytes == n_bytes
    assert found == replace(
        resolve_device(like), name=found.name, memory_bytes=n_bytes, source=f"the kernels and times of {like}"
    )
    assert resolve_device(found.name) == found  # commands and code name it so
    assert like in meant_by(typed)
    assert "a100-40gb" in meant_by("a100")
    assert not meant_by("rtx-4090")
