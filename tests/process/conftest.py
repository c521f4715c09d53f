"""For jobs of real processes: with a slow engine their tests have more time; commands that need no interpreters of
their own."""

from __future__ import annotations

import asyncio
import contextlib
import io
import subprocess
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .job import SLOWER


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SLOWER == 1:
        return
    for item in items:
        if item.path.parent == Path(__file__).parent:
            marker = item.get_closest_marker("timeout")
            seconds = marker.args[0] if marker else float(config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(4 * seconds), append=False)


class _Peer:
    """What `ftcomm.bench.peers` needs of a process of asyncio."""

    def __init__(self, rank: Any) -> None:
        self._rank, self.pid = rank, rank.pid

    @property
    def returncode(self) -> int | None:
        return self._rank.poll()

    async def wait(self) -> int:
        while self.returncode is None:
            await asyncio.sleep(0.02)
        return self.returncode


class _Output(io.StringIO):
    """Tells of its first line that is no comment before who has written it can go on."""

    def __init__(self, first_row: Callable[[], object]) -> None:
        super().__init__()
        self._first_row: Callable[[], object] | None = first_row

    def write(self, text: str) -> int:
        if self._first_row is not None and text.strip() and not text.startswith("#"):
            self._first_row()
            self._first_row = None
        return super().write(text)


class Bench:
    """`bench(ARGUMENTS)` is the command `ftcomm bench ARGUMENTS` in this process. Its ranks and those of its peers, but
    of MPI, are forks of a process that has imported torch."""

    def __init__(self) -> None:
        self.peers: list[_Peer] = []  # in the order in which they were started

    def __call__(
        self, *arguments: str, first_row: Callable[[], object] = lambda: None
    ) -> subprocess.CompletedProcess[str]:
        """`first_row` is called when that is written."""
        from ftcomm.cli import main

        out, errors, code = _Output(first_row), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                main(["bench", *arguments])
            except SystemExit as end:
                code = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, code, out.getvalue(), errors.getvalue())

    async def start_peer(self, *command: str, env: Any, stdout: Any, stderr: Any, **rest: Any) -> Any:
        """In place of `asyncio.create_subprocess_exec` for `ftcomm.bench.peers`."""
        from tests.rigs.preforked_ranks import with_log

        if "ftcomm.bench.rank" not in command[:3]:
            return await asyncio.create_subprocess_exec(*command, env=env, stdout=stdout, stderr=stderr, **rest)
        self.peers.append(_Peer(with_log(list(command), env=env, stdout=stdout, stderr=stderr)))
        return self.peers[-1]


@pytest.fixture
def bench(preforked: None, monkeypatch: pytest.MonkeyPatch) -> Bench:
    from ftcomm.bench import peers
    from tests.rigs.preforked_ranks import with_log

    bench = Bench()
    monkeypatch.setattr(
        peers, "asyncio", types.SimpleNamespace(**{**vars(asyncio), "create_subprocess_exec": bench.start_peer})
    )
    monkeypatch.setattr(peers, "subprocess", types.SimpleNamespace(**{**vars(subprocess), "Popen": with_log}))
    return bench
