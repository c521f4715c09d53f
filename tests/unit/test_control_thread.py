"""The control thread of a rank: what it waits for, what fails it, and what it says meanwhile."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from ftcomm.control import actions as act
from ftcomm.control import handshake, server
from ftcomm.control import messages as m
from ftcomm.control.data_plane import WaitsFor
from ftcomm.control.handshake import HandshakeError
from ftcomm.control.links import listen
from ftcomm.control.rank_errors import Gone, JoinError
from ftcomm.control.store import ViewStore
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.view_entry import WAKE_AGAIN, WAKE_UPS
from ftcomm.control.views import View
from ftcomm.sync.futex import MAX_SLEEP
from tests.fuzz.machines import TIMEOUTS
from tests.rigs.control_threads import CREDENTIALS, Job
from tests.rigs.peers import a_control_thread, framed
from tests.rigs.stopped_processes import DEADLINE, until

pytestmark = pytest.mark.usefixtures("time_for_handshakes")


def test_an_engine_that_does_not_stop_is_woken_for_as_long_as_it_may_have_missed_it() -> None:
    """Its longest sleep ends by itself, and then it has looked around: to wake it for ever takes a core."""
    with a_control_thread(1) as (control, _):
        woken: list[None] = []
        control.data_plane.wake = lambda: woken.append(None)  # type: ignore[method-assign]
        asyncio.run(asyncio.wait_for(control._entry.wake(asyncio.Event()), TIMEOUTS.op))
    assert len(woken) * WAKE_AGAIN >= MAX_SLEEP
    assert len(woken) == WAKE_UPS


def test_a_boundary_says_why_the_rank_has_failed_before_that_is_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script may come to it between the two, in a thread of its own."""
    with a_control_thread(1) as (control, _):
        monkeypatch.setattr(control._control, "_carry_out", lambda actions: None)
        control._control.do(control._node.failed, "the data plane was interrupted")
        with pytest.raises(Gone, match="the data plane was interrupted"):
            control.boundary(0, 1.0)


def test_who_is_on_its_way_in_waits_longer_than_who_waits_for_others_to_come() -> None:
    """Whatever the words are in which it is told so."""
    stranger = listen("127.0.0.1", 0)
    with stranger, a_control_thread(1, stranger) as (control, _):
        control.start()
        control._carry_out([act.JoinPending("some news", m.Stage.JOINING)])
        with ThreadPoolExecutor(1) as pool:
            register = pool.submit(control.register, 0.5)
            assert not wait([register], 2.0).done
            control._carry_out([act.JoinPending("other news", m.Stage.WAITING)])
            with pytest.raises(JoinError, match="other news"):
                register.result(DEADLINE)


def test_a_connection_that_comes_in_while_the_thread_ends_is_closed(count: Callable[[str], int]) -> None:
    """It is served by a task, which has to end before its loop is closed."""
    _end_while_one_comes_in()
    gc.collect()  # a task that has not ended says so then
    assert count("internal") == 0


def _end_while_one_comes_in() -> None:
    stranger = listen("127.0.0.1", 0)
    with stranger, a_control_thread(1, stranger) as (control, place):
        control.start()
        steps = handshake.client_steps(CREDENTIALS, "member", {"replica": 1}, control.address)
        with socket.create_connection(place) as sock, sock.makefile("rb") as answers:
            sock.sendall(framed(next(steps) or b""))
            challenge = answers.read(int.from_bytes(answers.read(4), "big"))
            assert next(steps) is None
            proof = framed(steps.send(challenge) or b"")

            async def prove_at_the_end() -> None:
                try:
                    begun.set()
                    await asyncio.sleep(DEADLINE)
                finally:
                    sock.sendall(proof)
                    await asyncio.sleep(0.2)

            begun = threading.Event()
            control._control.call(lambda: control._control.spawn(prove_at_the_end()))
            assert begun.wait(DEADLINE)
            control.stop()
            assert control._control.loop.is_closed()


def test_a_member_that_answers_the_coordinator_is_removed_by_no_proof_of_another() -> None:
    job = Job(2, 1)
    try:
        controls = [job.control_thread(replica, 0) for replica in range(2)]
        for one in controls:
            one.register(DEADLINE)
        controls[0].suspect(1, 1, "its process has ended", proof=True)
        until(lambda: bool(job.events_of("not_removed")))
        assert [event["why"] for event in job.events_of("view")] == ["all replicas are here"]
        controls[1].stop()  # it has, now
        controls[0].suspect(1, 1, "its process has ended", proof=True)
        until(lambda: len(job.events_of("view")) == 2)
    finally:
        job.close()


@pytest.mark.parametrize("ends", [False, True])
def test_an_error_in_the_control_thread_fails_what_waits_for_it(ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in its event loop may fail, and so may the loop itself."""

    def fails(*args: object) -> None:
        raise SystemExit("no more") if ends else ValueError("no more")

    job, failed, told = Job(2, 1), list[str](), threading.Event()
    try:
        controls = [job.control_thread(replica, 0) for replica in range(2)]
        for one in controls:
            assert one.register(DEADLINE)
        monkeypatch.setattr(controls[0].data_plane, "fail", lambda reason, ending: (failed.append(reason), told.set()))
        monkeypatch.setattr(controls[0]._node, "severed", fails)
        controls[0].severed(1, 1, "its connection was closed")
        assert told.wait(DEADLINE)
        assert "internal error in the control thread: " in failed[0]
        assert "no more" in failed[0]
        assert failed[0].startswith("replica 0 shard 0: ") is ends
        with pytest.raises(Gone, match="no more"):
            controls[0].boundary(1, DEADLINE)
        until(lambda: len(job.events_of("view")) == 2)
        assert "no more" in str(job.events_of("view")[1]["why"])
    finally:
        job.close()


def test_who_can_start_no_thread_waits_for_one_on_its_way_to_a_view_and_for_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says once of each which limit to raise, and what has connected meanwhile is served then."""
    start, left = threading.Thread.start, {"ftcomm-reach": 2, "ftcomm-data": 2}

    def starts(thread: threading.Thread) -> None:
        if left.get(thread.name, 0):
            left[thread.name] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    job, served = Job(1, 1), threading.Event()
    try:
        control = job.control_thread(0, 0)
        assert control.register(DEADLINE)
        assert not left["ftcomm-reach"]
        control.serve("data", lambda channel, fields: served.set())
        with control.dial(0, "data", {}):
            assert served.wait(DEADLINE)
        assert [record for record in caplog.records if "(ulimit -u" in record.getMessage()][2:] == []
    finally:
        job.close()
    assert "(ulimit -u" in caplog.text


@pytest.mark.parametrize("hangs_up", [True, False])
def test_who_can_serve_no_joiner_goes_on_itself(hangs_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no thread for that for as long as an op may take, and lets the connection go."""
    start, waiting = threading.Thread.start, []

    def starts(thread: threading.Thread) -> None:
        if thread.name == "ftcomm-state":
            waiting.append(thread._args[1])  # type: ignore[attr-defined]  # the connection
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    job = Job(1, 1, Timeouts.derive(60.0, 2.0) if hangs_up else Timeouts.derive(4.0))
    try:
        control = job.control_thread(0, 0)
        assert control.register(DEADLINE)
        control.serve("state", lambda channel, fields: None)
        with control.dial(0, "state", {}) as dialled:
            until(lambda: bool(waiting))
            if not hangs_up:
                dialled.settimeout(DEADLINE)
                assert dialled.recv(1) == b""
        until(lambda: waiting[0].fileno() == -1)
        assert not control._node.is_short(time.monotonic())
        assert control.boundary(0, DEADLINE).epoch == 1
    finally:
        job.close()


def test_who_waits_on_without_a_coordinator_says_once_in_the_time_of_an_op_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, told = Job(1, 1), list[float]()
    try:
        control = job.control_thread(0, 0)
        control.register(DEADLINE)
        monkeypatch.setattr(control.data_plane, "wait_on", told.append)
        with caplog.at_level(logging.WARNING, "ftcomm.control"):
            control._wait_on(19.0, 1.0)  # nothing waits
            monkeypatch.setattr(control.data_plane, "stalls", lambda seconds: WaitsFor(7, (1, 3)))
            monkeypatch.setattr(control._up, "refused", HandshakeError("it is of another job"))
            control._wait_on(20.0, 1.0)
            control._wait_on(21.0, 1.0)
        said = [text for text in (record.getMessage() for record in caplog.records) if "has not been heard" in text]
        assert len(said) == 1
        expected = (
            "waits for replicas 1, 3,",
            job.server.endpoint,
            "for 20 s",
            "kill -CONT PID",
            "waits for 1900 s more. Who is there refuses it: it is",
        )
        assert all(text in said[0] for text in expected)
        assert told == [1.0, 1.0, 1.0]
    finally:
        job.close()


def test_who_has_finished_waits_for_no_view_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is wrong with the store: it is tried again until it is mended, and what it is follows then."""
    append, broken = ViewStore.append, threading.Event()

    def fails(store: ViewStore, view: View) -> None:
        if broken.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        append(store, view)

    monkeypatch.setattr(ViewStore, "append", fails)
    monkeypatch.setattr(server, "RETRY", 0.05)
    job = Job(2, 1)
    try:
        controls = [job.control_thread(replica, 0) for replica in range(2)]
        for one in controls:
            one.register(DEADLINE)
        broken.set()
        controls[1].stop()
        until(lambda: bool(job.events_of("store")))
        controls[0].finish(DEADLINE)
        assert controls[0]._acked.is_set()
        assert len(job.events_of("view")) == 1
        broken.clear()
        until(lambda: len(job.events_of("store")) == 2)
        texts = [str(event["text"]) for event in job.events_of("store")]
        assert "Input/output error; mend the file system" in texts[0]
        assert "are stored" in texts[1]
        until(lambda: len(job.events_of("view")) == 2)
    finally:
        job.close()
