"""The processes of tests that are forks of a server."""

from __future__ import annotations

import os
import tempfile

import pytest

from tests.rigs.deadlines import DEADLINE
from tests.rigs.forked_companions import FORKED
from tests.rigs.preforked_ranks import Rank

pytestmark = pytest.mark.protocol

_STARTS_ANOTHER = """
import os
from ftcomm.control import companion
started = companion.subprocess.Popen(["python", "-c", ""], stdin=0, stdout=1, stderr=2, env=dict(os.environ))
assert started.wait() == 0
for place in range(3, 40):
    os.fstat(place)
print("ended")
"""


@pytest.mark.skipif(not FORKED, reason="companions are new interpreters")
def test_a_rank_has_its_descriptors_where_it_wants_them_and_can_still_start_a_companion() -> None:
    """Those by which it asks the server for a fork had some of these numbers, so one of its own was closed."""
    with tempfile.TemporaryFile("w+") as out, open(os.devnull) as nothing:
        fds = {place: nothing.fileno() for place in range(3, 40)} | {1: out.fileno(), 2: out.fileno()}
        rank = Rank(["-c", _STARTS_ANOTHER], os.environ, fds)
        code = rank.wait(DEADLINE)
        out.seek(0)
        assert (code, out.read()) == (0, "ended\n")
