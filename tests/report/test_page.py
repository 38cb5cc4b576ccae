"""The HTML page in a real browser: nothing overflows, no script fails, the table sorts, both themes show."""

from __future__ import annotations

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import sacplan
from tests.zoo.language_models import LM, cross_entropy, tokens

_BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
_LIGHT, _DARK = "rgb(255, 255, 255)", "rgb(21, 24, 28)"

pytestmark = pytest.mark.skipif(_BROWSER is None, reason="no Chromium or Chrome is installed")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profile = sacplan.profile(LM(), tokens(), loss_fn=cross_entropy, optimizer=torch.optim.AdamW)
    plan = sacplan.plan(profile, "smallest")
    path = tmp_path_factory.mktemp("page") / "report.html"
    return sacplan.Report(profile, plan, sacplan.frontier(profile, points=3)).write(path)


def _browse(page: Path, user: Path, fragment: str, width: int, *flags: str) -> str:
    """Standard output of the browser; ``user`` is a directory for its profile."""
    assert _BROWSER is not None
    command = [_BROWSER, *_FLAGS, f"--user-data-dir={user}", f"--window-size={width},1200", *flags]
    done = subprocess.run(
        [*command, f"{page.as_uri()}#{fragment}"], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


class _Root(HTMLParser):
    """The attributes of the root element."""

    found: dict[str, str | None]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "html":
            self.found = dict(attrs)


def _root(dom: str) -> dict[str, str | None]:
    parser = _Root()
    parser.feed(dom)
    return parser.found


def _in_frame(page: Path, folder: Path, width: int, fragment: str) -> Path:
    """A page that shows the report in a frame of that width and takes over what it says of itself.

    A window of this browser is 500 pixels wide at least, whatever it is asked for.
    """
    frame = folder / f"frame-{width}.html"
    frame.write_text(
        f'<!doctype html><body style="margin:0"><iframe src="{page.as_uri()}#{fragment}" '
        f'style="width:{width}px;height:1100px;border:0"></iframe><script>addEventListener("load", () => '
        "Object.assign(document.documentElement.dataset, "
        'document.querySelector("iframe").contentDocument.documentElement.dataset));</script>'
    )
    return frame


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_the_page_fits_and_works(page: Path, tmp_path: Path, width: int, theme: str) -> None:
    frame = _in_frame(page, tmp_path, width, f"selftest,theme={theme}")
    dom = _browse(frame, tmp_path / "user", "", 1400, "--allow-file-access-from-files", "--dump-dom")
    found = _root(dom)
    assert "data-errors" not in found, found
    assert found["data-client-width"] == str(width)
    assert int(found["data-scroll-width"] or width + 1) <= width
    assert found["data-outside"] == "0", found["data-outside-names"]
    assert found["data-background"] == (_DARK if theme == "dark" else _LIGHT)
    assert found["data-toggled"] == (_LIGHT if theme == "dark" else _DARK)
    down = [float(v) for v in (found["data-sorted-down"] or "").split()]
    up = [float(v) for v in (found["data-sorted-up"] or "").split()]
    assert len(set(down)) > 2
    assert down == sorted(down, reverse=True)
    assert up == sorted(down)
    assert "ms, " in (found["data-readout"] or "")
    assert "activations" in (found["data-readout"] or "")


def test_without_the_fragment_the_page_is_not_touched(page: Path, tmp_path: Path) -> None:
    found = _root(_browse(page, tmp_path / "user", "", 1400, "--dump-dom"))
    assert set(found) == {"lang"}
