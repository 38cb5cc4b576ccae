"""The page "Will it fit?": what it asks, what it shows, and that a person can use it in a browser, narrow and wide."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
APP = ROOT / "space" / "app.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CONFIG = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4,
    "n_positions": 256, "vocab_size": 512,
}  # fmt: skip


@pytest.fixture(scope="module")
def app() -> types.ModuleType:
    pytest.importorskip("gradio", reason="the page needs gradio: pip install gradio playwright")
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("space_app", APP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["space_app"] = module
    spec.loader.exec_module(module)
    return module


def test_the_folder_is_a_space() -> None:
    """Its front matter names the file to run and a version of gradio; its requirements are extras that there are."""
    front = yaml.safe_load((ROOT / "space" / "README.md").read_text(encoding="utf-8").split("---")[1])
    assert front["sdk"] == "gradio"
    assert (ROOT / "space" / front["app_file"]).is_file()
    assert len(front["short_description"]) <= 60
    wanted = (ROOT / "space" / "requirements.txt").read_text(encoding="utf-8")
    extras = set(re.fullmatch(r"sacplan\[([\w,]+)\]>=[\d.]+\n", wanted)[1].split(","))  # type: ignore[index]
    assert (
        {"hf", "lora", "plot"}
        <= extras
        <= set(importlib.metadata.metadata("sacplan").get_all("Provides-Extra"))
    )


def test_a_question_is_a_command_line(app: types.ModuleType, tmp_path: Path) -> None:
    asked = app.Question(
        "Qwen/Qwen3-8B", device="l4", batch=2, seq=512, lora_rank=8, in_4bit=True, fetch=True
    )
    assert asked.target(tmp_path) == "hf:Qwen/Qwen3-8B"
    assert asked.options() == [
        *("--device", "l4", "--batch", "2", "--dtype", "bfloat16", "--optimizer", "adamw", "--seq", "512"),
        *("--lora", "r=8", "--load-in-4bit", "--fetch"),
    ]
    for name in ("/etc/passwd", "../config.json", "train.py:make", "a b", ""):
        with pytest.raises(app.Failed, match="Name a model"):
            app.Question(name).target(tmp_path)


def test_every_suggestion_is_known(app: types.ModuleType) -> None:
    from sacplan import devices
    from sacplan._cli import architectures
    from sacplan._profile.optimizer_table import candidate_named

    assert all(architectures.find(name) for name in app.MODELS)
    assert all(name == "none" or candidate_named(name).name == name for name in app.OPTIMIZERS)
    assert set(app.DEVICES) <= set(devices().index)


@pytest.mark.slow
def test_a_configuration_is_answered_with_a_picture_and_code(app: types.ModuleType, tmp_path: Path) -> None:
    """On a CPU nothing is reserved, so a budget would be needed; on a GPU with 80 GB a small model fits as it is."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    first, last = app.answers(app.Question("", str(path), batch=4, seq=128))
    assert "It fits." in first[0]
    assert first[2] == app.NOTHING
    assert last[0] == first[0]
    assert last[2]["value"].axes
    assert "hf:config.json" in last[3]["value"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("no/such-model", {}, "nothing is downloaded unasked"),
        ("gpt2", {"seq": 4096}, "Tokens: 4096: gpt2 has positions for 1024 tokens"),
        ("gpt2", {"device": "h1000"}, "h1000"),
    ],
)
def test_errors_are_sentences(app: types.ModuleType, name: str, more: dict[str, Any], said: str) -> None:
    shown = list(app.answers(app.Question(name, **more)))
    assert len(shown) == 1
    assert said in shown[0][0]
    assert "Traceback" not in shown[0][0]


@pytest.fixture(scope="module")
def url(app: types.ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page as Spaces run it: a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("space")
    server = subprocess.Popen([sys.executable, APP], env=environment, cwd=folder)
    try:
        for _ in range(240):
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None, "the page ended"
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait()


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("width", [400, 1400])
def test_in_a_browser(url: str, width: int, tmp_path: Path) -> None:
    """A mistake, an uploaded file, QLoRA, another mistake; nothing comes from another host, and nothing sticks out."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"needs a browser: {', '.join(BROWSERS)}")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    elsewhere: list[str] = []

    def only_here(route: Any) -> None:
        if route.request.url.startswith(url) or route.request.url.startswith("data:"):
            route.continue_()
        else:
            elsewhere.append(route.request.url)
            route.abort()

    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": width, "height": 1000})
        page.set_default_timeout(240_000)
        page.route("**/*", only_here)
        page.goto(url, wait_until="domcontentloaded")
        go = page.get_by_role("button", name="Will it fit?")

        page.get_by_label("Model", exact=True).fill("../config.json")
        page.keyboard.press("Enter")
        go.click()
        page.wait_for_selector(".verdict.not")
        assert "Name a model as on the hub" in page.inner_text(".verdict")

        page.set_input_files("input[type=file]", str(tmp_path / "config.json"))
        page.get_by_text("config.json", exact=True).first.wait_for()
        page.get_by_label("Batch").fill("16384")
        go.click()
        page.wait_for_selector(".verdict.partly")  # over the 24 GB as it is
        assert "Not as it is, but with" in page.inner_text(".verdict")
        page.wait_for_selector("#picture img[src^='data:image/']:not([src*='svg'])")
        assert "sacplan.plan(" in page.inner_text("#python")
        assert "sacplan plan hf:config.json" in page.inner_text("#command").replace("\xa0", " ")
        assert page.locator(".rows tr").count() > 4
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        if pictures := os.environ.get("SACPLAN_PICTURES"):
            page.screenshot(path=Path(pictures, f"space{width}.png"), full_page=True)

        page.get_by_label("Batch").fill("4")
        page.get_by_label("LoRA rank").fill("4")
        page.get_by_label("Load in 4 bit").check()
        go.click()
        page.wait_for_selector(".verdict.fits")
        assert "LoRA r=4, 4-bit weights, batch 4" in page.inner_text(".verdict")
        page.wait_for_selector("#picture img[src^='data:image/']:not([src*='svg'])")
        assert "--lora r=4 --load-in-4bit" in page.inner_text("#command").replace("\xa0", " ")

        page.get_by_label("Tokens").fill("4096")  # the file has positions for 256
        go.click()
        page.wait_for_selector(".verdict.not")
        assert "Tokens: 4096" in page.inner_text(".verdict")
        assert page.locator("#picture img").count() == 0
        chromium.close()
    assert elsewhere == []
