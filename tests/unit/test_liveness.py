"""Whether a kernel answers, with the kernel's own sockets and processes that are stopped and killed.

`tests/hosts` shows that acknowledgements end where the network does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import types

import msgspec
import pytest

import ftcomm
from ftcomm.control import liveness
from ftcomm.control.liveness import unanswered
from ftcomm.control.views import Address, Addresses, Member, View
from tests.rigs.stopped_processes import Peer, until


def test_the_kernel_of_a_stopped_process_answers_until_the_process_ends(peer: Peer) -> None:
    with socket.create_connection(peer.address) as sock:
        sock.sendall(b"ping")
        assert peer.says() == "x"
        peer.stop()
        for _ in range(20):
            sock.sendall(b"ping")
            until(lambda: unanswered(sock) == 0.0)
        peer.kill()
        until(lambda: unanswered(sock) is None)


def test_a_stopped_process_that_has_no_room_for_more_still_lives(peer: Peer) -> None:
    """Its window is closed, so nothing is sent any more; the kernel asks now and then, and is answered."""
    with socket.create_connection(peer.address) as sock:
        peer.stop()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 16))
        end = time.monotonic() + 3.0
        answered = 0.0
        while time.monotonic() < end:
            seconds = unanswered(sock)
            assert seconds is not None
            if seconds == 0.0:
                answered = time.monotonic()
            time.sleep(0.05)
        assert answered
        peer.kill()
        until(lambda: unanswered(sock) is None)


def test_a_socket_without_a_connection_has_no_answer() -> None:
    with socket.socket() as sock:
        assert unanswered(sock) is None


def test_the_answer_says_what_the_process_does(peer: Peer) -> None:
    assert "holds the interpreter lock" in liveness.described(31.2)
    assert "FTCOMM_OP_TIMEOUT" in liveness.described(31.2)
    assert "has not spoken for 31 s" in liveness.described(31.2)
    assert "is stopped (SIGSTOP" not in liveness.described(31.2, liveness.state(os.getpid()))
    peer.stop()
    assert "is stopped (SIGSTOP" in liveness.described(31.2, liveness.state(peer.process.pid))
    peer.kill()
    assert liveness.state(peer.process.pid) == ""


def test_a_process_that_ends_is_seen_by_its_kernel() -> None:
    """Its port may answer still: it was asked for 40 ms, for as long as its memory was being freed."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    there = Address("h", 1, liveness.boot(), child, 3, "0" * 32, pids=liveness.pids())
    elsewhere = [
        msgspec.structs.replace(there, boot="another kernel"),
        msgspec.structs.replace(there, pids="of a container"),
        msgspec.structs.replace(there, pids=""),
    ]
    assert not liveness.is_ending(there)
    assert liveness.why_lost(there) == f"its process {child} runs, and takes no part in the job any more"
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED)
    assert not liveness.is_ending(there)
    os.kill(child, signal.SIGKILL)
    assert liveness.is_ending(there), "it will not run again, whether it has got to its end or not"
    assert liveness.why_lost(there) == f"its process {child} has ended"
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert liveness.is_ending(there)
    os.waitpid(child, 0)
    assert liveness.is_ending(there)
    assert not any(liveness.is_ending(one) for one in elsewhere)
    assert {liveness.why_lost(one) for one in elsewhere} == {f"its process {child} has ended"}
    assert not liveness.is_ending(msgspec.structs.replace(there, pid=os.getpid()))


@pytest.mark.parametrize("shards", [1, 2])
def test_a_member_that_has_left_is_not_said_to_have_died(shards: int) -> None:
    """What its peers see is the end of its control thread, which may be that of its process, or not."""
    told: list[str] = []
    group = object.__new__(ftcomm.Group)
    group.shard, group.shards = 0, shards
    group._control_thread = types.SimpleNamespace(  # type: ignore[assignment]
        suspect=lambda replica, epoch, reason, proof: told.append(reason)
    )
    child = subprocess.Popen(["true"])
    child.wait()
    for pid in (os.getpid(), child.pid):
        there = Address("h", 1, liveness.boot(), pid, 3, "0" * 32, pids=liveness.pids())
        group._view = View(1, 0, (Member(2, "a", Addresses.of([there]), True),), "")
        group._died(2, 1)
        group._died(3, 1)  # of which this view says nothing
    which = "its process" if shards == 1 else "the process of its shard 0"
    runs, died = f"{which} runs, and takes no part in the job any more", f"{which} died"
    assert told == [runs, died, died, died]
