"""For all tests."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.rigs import sources

if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is imported


os.environ["FTCOMM_HISTORY"] = "off"  # jobs of tests are not those of a person


def pytest_configure(config: pytest.Config) -> None:
    """Let workers be forks. A shell lets what it starts in the background ignore SIGINT, `nohup` lets it ignore SIGHUP,
    and so would all that the tests start and stop."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from tests import workers

        if workers.SHARED:
            workers.fork()


ORDER = ("kernels", "hosts", "process", "torch")  # of the folders in tests/; the others follow


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """To look for garbage takes a fifth of the time in which all is imported, and there is none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    yield
    if len(sys.modules) + sources.kept() >= _frozen + 10:
        _freeze()


_frozen = 0  # modules, and trees of sources, that there were when garbage was last told from them


def _freeze() -> None:
    """Leave out of each collection of garbage what is imported by now, and what `sources` keeps. Looking through
    it takes most of the time (a second for the trees of all sources, at the end of each rig), and its size makes
    collections rare: rigs, which are cycles and hold segments, took up 20 GB in between."""
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules) + sources.kept()


ALL_PROTOCOL = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.protocol\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which `-m "not protocol and ..."` chooses no test is imported by none of the workers."""
    if "not protocol" not in config.getoption("markexpr") or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    independent = _folder(collection_path) == "unit" and "import torch" not in text
    return True if independent or ALL_PROTOCOL.search(text) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests go first, so that none runs alone at the end. A unit test that does not import torch does not depend
    on which one there is."""
    for item in items:
        if _folder(item.path) == "unit" and "torch" not in vars(getattr(item, "module", None)):
            item.add_marker(pytest.mark.protocol)
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, int]:
    folder = _folder(item.path)
    return item.get_closest_marker("slow") is None, ORDER.index(folder) if folder in ORDER else len(ORDER)


@functools.cache
def _folder(path: Path) -> str:
    """Of tests/, in which the file lies."""
    return path.relative_to(Path(__file__).parent).parts[0]


@pytest.fixture
def preforked(_fork_server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks of a `Launcher` be forks of a process that has imported torch, and not new interpreters."""
    from ftcomm.launch import process
    from tests.rigs import preforked_ranks

    monkeypatch.setattr(process, "subprocess", preforked_ranks.subprocess_of_ranks(subprocess))


@pytest.fixture(scope="session")
def _fork_server() -> None:
    """Wait for what it imports, before a test looks at its clock."""
    from tests.rigs import preforked_ranks

    preforked_ranks.warm()


with contextlib.suppress(ImportError):  # a machine with a GPU may lack it
    from hypothesis import HealthCheck, settings

    # A busy machine fails no test for being slow. The same examples are drawn each time: what is refused for chance is
    # no help. `--hypothesis-profile=search` draws others.
    settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
    settings.register_profile("search", settings.get_profile("steady"), derandomize=False)
    settings.load_profile("steady")
