"""The fault-tolerance hooks of torchtitan, from the registry, on CPUs: a replica is killed, comes back, both end alike.

`make test-torchtitan` installs it. Its trainer needs a GPU to begin; the hooks are all that it has of fault tolerance.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.deadlines import DEADLINE
from tests.rigs.ports import free_port

pytest.importorskip("torchtitan")
pytest.importorskip("torchft")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


class Replica:
    """One in a process of its own, with what it prints."""

    def __init__(self, number: int, here: Path, environment: dict[str, str], *, returned: bool = False) -> None:
        self.log = here / f"{number}{'-returned' * returned}.log"
        command = [sys.executable, "-m", "tests.integrations.titan_hooks", str(number)]
        command += ["returned" if returned else "first", str(here / str(number))]
        with self.log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def until(self, pattern: str) -> re.Match[str]:
        """Reads to a line that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.match(pattern, line):
                return found
        raise AssertionError(f"ended without {pattern!r}:\n{self.log.read_text()[-4000:]}")


@pytest.fixture
def environments() -> Iterator[list[dict[str, str]]]:
    """Of two replicas of one rank each, and a lighthouse of torchft."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000)
    shared = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    shared["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1]}"
    yield [os.environ | shared | {"MASTER_PORT": str(free_port())} for _ in range(2)]
    lighthouse.shutdown()


@pytest.mark.timeout(DEADLINE)
@pytest.mark.shows("own processes", "torchtitan's hooks", "RSJE")
def test_a_replica_is_killed_and_comes_back(tmp_path: Path, environments: list[dict[str, str]]) -> None:
    replicas = [Replica(number, tmp_path, environments[number]) for number in range(2)]
    try:
        replicas[0].until(r"step \d+ of 2")
        replicas[1].until(r"step \d+ of 2")
        replicas[1].process.send_signal(signal.SIGKILL)
        replicas[1].process.wait()
        replicas[0].until(r"step \d+ of 1")
        replicas.append(Replica(1, tmp_path, environments[1], returned=True))
        replicas[0].until(r"step \d+ of 2")
        ended = [each.until(r"weights (\w+)").group(1) for each in (replicas[0], replicas[2])]
    finally:
        for each in replicas:
            each.process.kill()
            each.process.wait()
    assert ended[0] == ended[1], "the weights differ"
