"""What all tests run under: one thread, the same random examples every time, and one case of each slow sweep."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

from sacplan.errors import SacplanError

# oneDNN multiplies half types with other kernels on CPUs that have instructions for them. They take workspaces, so
# that peaks, and with them plans, would be others. It is read when oneDNN first runs, also by processes of tests.
os.environ["DNNL_MAX_CPU_ISA"] = "AVX2"
torch.set_num_threads(1)  # threads that wait for one another on a busy machine cost minutes
gc.set_threshold(
    10_000, 20, 20
)  # by default, looking for cycles among all that torch holds is a tenth of the time

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow cases exhaustive, but for the first of a test with no quick one; none of ``every_case``.

    Files with many slow tests come first, then those with many tests: where several processes take a file each, none
    begins a long one when the others are done.
    """
    seen: set[tuple[object, str]] = set()
    for item in items:
        if item.get_closest_marker("exhaustive"):  # ``make test`` leaves out what is slow
            item.add_marker(pytest.mark.slow)
    for item in sorted(items, key=lambda item: item.get_closest_marker("slow") is not None):
        if not item.get_closest_marker("every_case") and not item.get_closest_marker("exhaustive"):
            test = item.parent, getattr(item, "originalname", item.name)
            if item.get_closest_marker("slow") and test in seen:
                item.add_marker(pytest.mark.exhaustive)
            seen.add(test)
    tests = Counter(item.path for item in items)
    slow = Counter(
        item.path
        for item in items
        if item.get_closest_marker("slow") and not item.get_closest_marker("exhaustive")
    )
    items.sort(key=lambda item: (-slow[item.path], -tests[item.path], item.path))


def pytest_collection_finish() -> None:
    """Leave modules and tests out of garbage collections, of which libraries ask for many: they stay anyway.

    From here on, nothing that is imported is written down in compiled form.
    """
    gc.collect()
    gc.freeze()
    # Some tests write a module, import it, and write it again. Within a second, and with the same size, Python would
    # take what it has compiled of the first one. All that is installed is compiled by now.
    sys.dont_write_bytecode = True


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--rooms`` says how long each folder of tests took."""
    parser.addoption(
        "--rooms", action="store_true", help="print the seconds that the tests of each room took"
    )


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print seconds by folder, set-up included, of all processes together."""
    if not config.getoption("--rooms"):
        return
    seconds: Counter[str] = Counter()
    reports = itertools.chain.from_iterable(terminalreporter.stats.values())
    for report in reports:
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.split("/")[1]] += report.duration
    terminalreporter.section("seconds by room")
    for room, taken in seconds.most_common():
        terminalreporter.write_line(f"{taken:7.0f}  {room}")
    terminalreporter.write_line(f"{seconds.total():7.0f}  in all")


@pytest.fixture(autouse=True)
def texts_of_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the text of every error of sacplan that a test makes, whether or not the test looks at it."""

    def init(self: SacplanError, *args: object) -> None:
        super(SacplanError, self).__init__(*args)
        assert str(self), type(self)

    monkeypatch.setattr(SacplanError, "__init__", init)


@pytest.fixture(scope="module")
def no_cublas_workspaces() -> Iterator[None]:
    """The tests of a file plan for a GPU without the workspaces of cuBLAS.

    Two of 32 MiB are most of what a small model takes on an H100, and no plan makes them smaller; so tests of budgets
    ask for this: ``pytestmark = pytest.mark.usefixtures("no_cublas_workspaces")``.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
        yield
