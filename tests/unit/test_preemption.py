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


def test_a_forked_child_ends_by_it_however_early_and_says_nothing() -> None:
    """Workers of a multiprocessing pool are ended so. If one is not, the pool waits for it for ever."""
    group = Group()
    with PreemptionHandler(group):  # type: ignore[arg-type]
        for _ in range(10):  # Python forgets in a child what signals have come until it starts there
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(group.left)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert group.left == 0
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        os.kill(os.getpid(), signal.SIGTERM)
        assert group.left == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_script_stays_in_its_children() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    try:
        with PreemptionHandler(Group()):  # type: ignore[arg-type]
            child = os.fork()
            if child == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        signal.signal(signal.SIGTERM, before)
