"""SIGTERM in a step loop."""

from __future__ import annotations

import os
import signal
import time

from ftcomm.training.preemption import PreemptionHandler


class Group:
    def __init__(self) -> None:
        self.left = 0

    def leave(self) -> None:
        self.left += 1


def test_a_forked_child_ends_by_it_and_says_nothing() -> None:
    """Workers of a multiprocessing pool are ended so; before, the pool waited for them for ever."""
    group = Group()
    with PreemptionHandler(group):  # type: ignore[arg-type]
        there, here = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(here, b"1")  # before, Python forgets the signals of the parent
            time.sleep(60)
            os._exit(group.left)
        assert os.read(there, 1) == b"1"
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert group.left == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert group.left == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
