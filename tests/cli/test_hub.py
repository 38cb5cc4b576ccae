"""Configurations from the hub: its cache in every form, and one file fetched if the user says so, from a fake hub."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from huggingface_hub import constants
from typer.testing import CliRunner

from sacplan.cli import targets
from sacplan.cli.app import app
from sacplan.cli.targets import load_target
from sacplan.integrations.hf.target import ModelOptions, TargetError

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 64,
}  # fmt: skip
COMMIT = "0" * 39 + "1"


class Hub:
    """A hub on this machine with one model, and one that is gated; it notes requests."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        noted = self.asked

        class Handler(BaseHTTPRequestHandler):
            def answer(self, *, body: bool) -> None:
                noted.append(f"{self.command} {self.path}")
                code, error, content = 404, "RepoNotFound", b""
                if self.path == "/org/tiny/resolve/main/config.json":
                    code, error, content = 200, "", json.dumps(CONFIG).encode()
                elif self.path.startswith("/org/closed/"):
                    code, error = 403, "GatedRepo"
                self.send_response(code)
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
                self.send_header("Content-Length", str(len(content)))
                if error:
                    self.send_header("X-Error-Code", error)
                self.end_headers()
                if body:
                    self.wfile.write(content)

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    yield found
    found.server.shutdown()
    found.server.server_close()


def of_the_config(loaded: Any) -> bool:
    return loaded.facts["model"] == "LlamaForCausalLM" and loaded.model.config.hidden_size == 32


def test_nothing_is_fetched_unasked(fake: Hub) -> None:
    result = CliRunner().invoke(app, ["profile", "hf:org/tiny"])
    assert result.exit_code == 2
    assert "nothing is downloaded unasked" in result.stderr
    assert "hint: --fetch fetches this one file" in result.stderr
    assert fake.asked == []


def test_one_file_is_fetched_once_and_it_is_said(fake: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert of_the_config(load_target("hf:org/tiny", ModelOptions(fetch=True)))
    said = capsys.readouterr()
    assert f"note: fetching config.json of org/tiny, and no other file, from {fake.url}" in said.err
    assert said.out == ""
    assert {line.partition(" ")[2] for line in fake.asked} == {"/org/tiny/resolve/main/config.json"}
    fake.asked.clear()
    # From the cache: no option, no request, no note.
    assert of_the_config(load_target("hf:org/tiny", ModelOptions()))
    assert fake.asked == []
    assert "fetching" not in capsys.readouterr().err


@pytest.mark.parametrize("answer", [True, False])
def test_on_a_terminal_the_user_is_asked(fake: Hub, monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    asked: list[str] = []
    monkeypatch.setattr(targets.typer, "confirm", lambda text, err: asked.append(text) or answer)
    with nullcontext() if answer else pytest.raises(TargetError, match="nothing is downloaded unasked"):
        load_target("hf:org/tiny", ModelOptions())
    assert asked == [f"Fetch config.json of org/tiny, and no other file, from {fake.url}?"]
    assert bool(fake.asked) == answer


def test_what_the_hub_does_not_give_is_a_sentence(fake: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def failed(name: str) -> str:
        with pytest.raises(TargetError, match=r"could not be fetched.*Or give the file itself") as info:
            load_target(f"hf:{name}", ModelOptions(fetch=True))
        return str(info.value)

    assert "Cannot access gated repo" in failed("org/closed")
    assert "make sure you are authenticated" in failed("org/none")
    fake.server.shutdown()
    fake.server.server_close()
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library waits before it tries again
    assert "check your connection" in failed("org/tiny")


def test_a_cache_is_found_in_every_form(fake: Hub, tmp_path: Path) -> None:
    """As the library leaves it; copied without its branches; as a folder that is named; as a snapshot."""
    load_target("hf:org/tiny", ModelOptions(fetch=True))
    fake.asked.clear()
    folder = tmp_path / "hub" / "models--org--tiny"
    shutil.rmtree(folder / "refs")
    shutil.rmtree(folder / ".no_exist", ignore_errors=True)
    snapshot = folder / "snapshots" / COMMIT
    for text in ("org/tiny", folder, snapshot, snapshot / "config.json"):
        assert of_the_config(load_target(f"hf:{text}", ModelOptions()))
    assert fake.asked == []
    # The newest of several.
    newer = folder / "snapshots" / "2"
    newer.mkdir()
    (newer / "config.json").write_text(json.dumps({**CONFIG, "hidden_size": 64}))
    assert load_target("hf:org/tiny", ModelOptions()).model.config.hidden_size == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as a configuration"),
        ('{"model_type": "of_another_year"}', "of_another_year"),
        ('{"hidden_size": 3}', "model_type"),
        (
            '{"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}',
            "code that comes with its weights",
        ),
    ],
)
def test_what_is_no_configuration_is_a_sentence(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    (tmp_path / "own.py").write_text("raise SystemExit('this code must not run')")
    with pytest.raises(TargetError, match=message):
        load_target(f"hf:{tmp_path}", ModelOptions())
