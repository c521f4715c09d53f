"""Between hosts: a kernel that cannot be reached is heard no more, and a process that only says nothing is kept."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from ftcomm.control.liveness import unanswered
from ftcomm.control.wire import tune
from ftcomm.lab.netns.network import LabNetwork
from ftcomm.lab.netns.slow_network import SlowNetwork
from tests.rigs.stopped_processes import until

from .job import HostJob
from .test_network import DEADLINE, PORT, line  # noqa: F401
from .test_promises import SETTINGS, Watch, agree, assert_removed, cables  # noqa: F401

pytestmark = pytest.mark.protocol


def test_acknowledgements_end_with_the_network_and_come_back_with_it(line: SlowNetwork) -> None:  # noqa: F811
    """At the other end nobody accepts the connection, as if all stood still there."""
    with line.inside(1):
        server = socket.create_server((line.address(1), PORT))
    with line.inside(0):
        sock = socket.create_connection((line.address(1), PORT), timeout=DEADLINE)
    with server, sock:
        tune(sock)
        for lost in ([0], [1]), ([1], [0]):  # the way there, the way back
            sock.sendall(b"ping")
            until(lambda: unanswered(sock) == 0.0)
            before = line.change(*lost, up=False)
            sock.sendall(b"ping")
            until(lambda: (unanswered(sock) or 0.0) > 1.0)
            line.restore(before)
            until(lambda: unanswered(sock) == 0.0)


def test_a_silent_host_goes_and_a_stopped_process_stays(cables: LabNetwork, tmp_path: Path) -> None:  # noqa: F811
    """Neither says anything; the kernel of one of them answers."""
    with HostJob(tmp_path, cables, elements=1000, **SETTINGS) as job:
        watch = Watch(job)
        job.wait_contributing(watch.everybody)
        watch.goes_on(watch.everybody)
        job.signal(1, signal.SIGSTOP)
        cable = job.unplug(2)
        assert watch.without(1, 2) == 2
        job.signal(1, signal.SIGCONT)
        watch.goes_on({0, 1, 3})
        assert watch.newest() == {0, 1, 3}
        cable.close()
        assert_removed(job, 2)
        job.drain()
        for replica in (0, 1, 3):
            assert job.join(replica) == [0], job.errors()
        agree(job)
