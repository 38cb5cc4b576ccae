"""Files of profiles and devices: what is read is what was written, or one error; types forbid what the loader does."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sacplan
from sacplan.core import files
from sacplan.device.devices import device_fields
from sacplan.device.files import file_of
from sacplan.errors import DeviceError, SacplanError
from sacplan.profiling import files as profile_files
from sacplan.profiling.files import ProfileFile
from tests.support.damage import damaged_contents, set_to

PROFILES = jsonschema.Draft202012Validator(msgspec.json.schema(ProfileFile))
DEVICES = jsonschema.Draft202012Validator(msgspec.json.schema(file_of(device_fields())))

LOADERS: dict[str, tuple[Callable[[Path], Any], type[SacplanError]]] = {
    "plan": (sacplan.Plan.load, sacplan.errors.PlanError),
    "profile": (sacplan.Profile.load, sacplan.errors.TraceError),
    "device": (sacplan.DeviceSpec.load, DeviceError),
}


@pytest.fixture(scope="module")
def profile() -> sacplan.Profile:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    return sacplan.profile(model, torch.ones(4, 8), None, torch.optim.SGD, device="h100")


@pytest.fixture(scope="module")
def saved(profile: sacplan.Profile, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The contents of a file of each kind."""
    folder = tmp_path_factory.mktemp("saved")
    sacplan.plan(profile, 50).save(folder / "plan")
    profile.save(folder / "profile")
    profile.spec.save(folder / "device")
    return {kind: (folder / kind).read_bytes() for kind in LOADERS}


def signed(data: dict[str, Any]) -> dict[str, Any]:
    """The contents of a file of a profile, with the checksum that is theirs."""
    fields = msgspec.json.decode(json.dumps(data), type=_Unchecked)
    return data | {"sha256": profile_files._digest(fields)}


_Unchecked = msgspec.defstruct("_Unchecked", [], bases=(profile_files._Fields,), forbid_unknown_fields=False)


# --- what is written --------------------------------------------------------------------------------------


def test_what_is_saved_is_valid(saved: dict[str, bytes], tmp_path: Path) -> None:
    PROFILES.validate(json.loads(saved["profile"]))
    DEVICES.validate(json.loads(saved["device"]))
    for name in ("cpu", "t4", "mi300x"):
        sacplan.device.devices.resolve_device(name).save(tmp_path / "device.json")
        DEVICES.validate(json.loads((tmp_path / "device.json").read_text()))


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("trace", ["fake", "real"])
def test_there_and_back(mode: str, trace: str, tmp_path: Path) -> None:
    """Also what was written with other spaces and another order of keys."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout())
    made = sacplan.profile(model, torch.ones(2, 3, 8, 8), device="cpu", mode=mode, trace=trace)
    path = tmp_path / "profile.json"
    made.save(path)
    assert sacplan.Profile.load(path) == made
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True, indent=3))
    assert sacplan.Profile.load(path) == made


# --- files that are none ----------------------------------------------------------------------------------

_DEEP = 100_000
NONE: dict[str, bytes] = {
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "binary": bytes(range(256)),
    "zeros": b"\x00" * 1000,
    "not UTF-8": b'{"what": "\xff"}',
    "UTF-16": '{"what": "plan"}'.encode("utf-16"),
    "cut off": b'{"what": "plan", "schema_ver',
    "brackets": b"[" * _DEEP,
    "objects": b'{"a":' * _DEEP,
    "another file": b'{"model_type": "llama", "hidden_size": 64}',
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("name", NONE)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_files_that_are_none(kind: str, name: str, suffix: str, tmp_path: Path) -> None:
    load, error = LOADERS[kind]
    path = tmp_path / f"file{suffix}"
    path.write_bytes(gzip.compress(NONE[name]) if suffix.endswith(".gz") else NONE[name])
    with pytest.raises(error, match=rf"not a sacplan {kind}"):
        load(path)


@pytest.mark.parametrize("kind", LOADERS)
def test_damaged_compression(kind: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    load, error = LOADERS[kind]
    path, packed = tmp_path / "file.json.gz", gzip.compress(saved[kind])
    for damaged in (packed[:-1], packed[: len(packed) // 2], packed[:5], packed + b"more", saved[kind]):
        path.write_bytes(damaged)
        with pytest.raises(error, match="not a sacplan"):
            load(path)


@pytest.mark.parametrize("kind", LOADERS)
def test_files_without_end(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 KB that unpack to 4 MiB, and a file that never ends."""
    monkeypatch.setattr(files, "LARGEST_FILE", 2**20)
    load, error = LOADERS[kind]
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b'{"what": "plan", "x": "' + b" " * 2**22 + b'"}'))
    for path in (bomb, Path("/dev/zero")):
        with pytest.raises(error, match="more than 1 MiB"):
            load(path)


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    "number", ["NaN", "Infinity", "-Infinity", "1e400", "1" + "0" * 400, str(2**64), "-1", '"1"', "true"]
)
def test_numbers_that_are_none(kind: str, number: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    load, error = LOADERS[kind]
    path, text = tmp_path / "file.json", saved[kind].decode()
    key = {"plan": '"peak_bytes":', "profile": '"memory_bytes":', "device": '"bandwidth_bytes_per_s":'}[kind]
    before, _, after = text.partition(key)
    end = next(i for i, c in enumerate(after) if c in ",\n}")
    path.write_text(f"{before}{key}{number}{after[end:]}")
    if kind == "device" and number in (str(2**64), "1" + "0" * 400):
        number = "a rate"  # of a device that is none: the first is one
    try:
        load(path)
    except error:
        return
    assert number == "a rate"


@pytest.mark.parametrize("kind", LOADERS)
def test_a_key_twice(kind: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    """Readers of JSON take the first or the last; the last is right here."""
    load, error = LOADERS[kind]
    path, text = tmp_path / "file.json", saved[kind].decode()
    key = {"plan": '"peak_bytes":', "profile": '"spec":', "device": '"memory_bytes":'}[kind]
    path.write_text(text.replace(key, f"{key} 1, {key}" if kind != "profile" else f"{key} {{}}, {key}", 1))
    with pytest.raises(error):
        load(path)
    path.write_text(text.replace("{", '{"what":"' + kind + '",', 1))
    with pytest.raises(error, match="'what' twice"):
        load(path)


# --- contents ---------------------------------------------------------------------------------------------

CHANGES = {
    "another type": set_to("recorded", "storage_bytes", 0, to="1"),
    "a negative size": set_to("recorded", "storage_bytes", 0, to=-1),
    "a 400-digit size": set_to("recorded", "storage_bytes", 0, to=10**400),
    "a negative time": set_to("recorded", "ops", 0, 3, to=-1.0),
    "an unknown phase": set_to("recorded", "ops", 0, 1, to=7),
    "an unknown mode": set_to("mode", to="sleep"),
    "an unknown key": set_to("mood", to="good"),
    "an unknown key inside": set_to("recorded", "mood", to="good"),
    "a missing key": lambda data: data.pop("recorded"),
    "a missing key inside": lambda data: data["recorded"].pop("ops"),
    "another schema version": set_to("schema_version", to=2),
    "a checksum of another form": set_to("sha256", to="0"),
}
"""What the schema of profiles forbids."""

MEANINGS = {
    "a type that torch does not have": set_to("recorded", "tensors", 0, 1, to="nn"),
    "a parameter of such a type": set_to("fingerprint", "parameters", 0, 2, to="nn"),
}
"""What is forbidden besides, also with the right checksum: another version of torch may have made the file."""


@pytest.mark.parametrize("change", CHANGES)
def test_schema_and_loader_reject_the_same(change: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    data = json.loads(saved["profile"])
    CHANGES[change](data)
    assert not PROFILES.is_valid(data)
    (tmp_path / "profile.json").write_text(json.dumps(data))
    with pytest.raises(sacplan.errors.TraceError, match=r"profile\.json .*[Mm]ake the profile again"):
        sacplan.Profile.load(tmp_path / "profile.json")


@pytest.mark.parametrize("change", MEANINGS)
def test_profiles_that_mean_nothing(change: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    data = json.loads(saved["profile"])
    MEANINGS[change](data)
    PROFILES.validate(data)
    (tmp_path / "profile.json").write_text(json.dumps(signed(data)))
    with pytest.raises(sacplan.errors.TraceError, match="not a sacplan profile") as info:
        sacplan.Profile.load(tmp_path / "profile.json")
    assert "checksum" not in str(info.value)


def test_an_edited_profile_is_not_what_it_says(saved: dict[str, bytes], tmp_path: Path) -> None:
    data, path = json.loads(saved["profile"]), tmp_path / "profile.json"
    data["recorded"]["ops"][0][3] += 1.0
    path.write_text(json.dumps(data))
    with pytest.raises(sacplan.errors.TraceError, match="damaged or edited"):
        sacplan.Profile.load(path)
    path.write_text(json.dumps(signed(data)))
    assert sacplan.Profile.load(path).step_ms > 1.0


WRONG_DEVICES = {
    "no name": set_to("spec", "name", to=""),
    "no memory": set_to("spec", "memory_bytes", to=0),
    "memory of text": set_to("spec", "memory_bytes", to="80GiB"),
    "a misspelt figure": set_to("spec", "memory_gib", to=80),
    "more than all of the peak": set_to("spec", "compute_efficiency", to=1.5),
    "a link that is none": set_to("spec", "inner_link", to={"name": "x"}),
    "a kind that is none": set_to("spec", "kind", to="tpu"),
    "no bandwidth": lambda data: data["spec"].pop("bandwidth_bytes_per_s"),
    "half a capability": set_to("spec", "capability", to=[9]),
    "another schema version": set_to("schema_version", to=1),
}


@pytest.mark.parametrize("change", WRONG_DEVICES)
def test_devices_that_are_none(change: str, saved: dict[str, bytes], tmp_path: Path) -> None:
    data, path = json.loads(saved["device"]), tmp_path / "device.json"
    WRONG_DEVICES[change](data)
    assert not DEVICES.is_valid(data)
    path.write_text(json.dumps(data))
    with pytest.raises(DeviceError, match=r"device\.json"):
        sacplan.DeviceSpec.load(path)


def test_a_device_without_a_peak(saved: dict[str, bytes], tmp_path: Path) -> None:
    data, path = json.loads(saved["device"]), tmp_path / "device.json"
    data["spec"]["flops"] = {}
    path.write_text(json.dumps(data))
    with pytest.raises(DeviceError, match=r"device\.json.*float32"):
        sacplan.DeviceSpec.load(path)


# --- damage at random -------------------------------------------------------------------------------------

damage = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@damage
@given(st.data())
def test_damaged_contents(
    saved: dict[str, bytes], profile: sacplan.Profile, tmp_path_factory: Any, data: st.DataObject
) -> None:
    changed = damaged_contents(saved["profile"], data)
    _equal_or_error(json.dumps(changed).encode(), profile, tmp_path_factory)


def _equal_or_error(text: bytes, profile: sacplan.Profile, factory: pytest.TempPathFactory) -> None:
    path = factory.getbasetemp() / "damaged-profile.json"
    path.write_bytes(text)
    try:
        loaded = sacplan.Profile.load(path)
    except sacplan.errors.TraceError as error:
        said = str(error)
    else:
        said = f"{path}"
        assert loaded == profile
    assert str(path) in said
