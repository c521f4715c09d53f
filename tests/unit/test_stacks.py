"""Another process sees where the threads of this one stand: free, busy, holding the interpreter, frozen or dead."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ftcomm.diagnosis import processes, stacks
from ftcomm.diagnosis.frames import of_script
from ftcomm.process.stacks import HEAD, SOCKET, WRITTEN, StackServer, here
from tests.stacks import finish, harass, running


def functions(taken: stacks.Stacks) -> set[str]:
    return {frame.function for thread in taken.threads for frame in thread.frames}


def test_a_process_that_sleeps_answers(tmp_path: Path) -> None:
    with running(tmp_path, "sleeps") as (prefix, process):
        taken = stacks.take(prefix, process.pid)
        assert not taken.held
        assert taken.threads[0].name == "MainThread"
        assert taken.threads[0].id == process.pid
        assert taken.main[0].function == "child"
        assert taken.main[0].file.endswith("tests/stacks.py")
        assert finish(process) == 0
        assert not list(tmp_path.iterdir()), "it has left files behind"


def test_a_process_that_holds_its_interpreter_is_signalled(tmp_path: Path) -> None:
    with running(tmp_path, "holds") as (prefix, process):
        while not stacks.take(prefix, process.pid).held:
            pass  # it is about to hold it
        for _ in range(3):
            taken = stacks.take(prefix, process.pid)
            while taken.missing.startswith("it has no time"):  # a busy machine: the thread that answers has no CPU
                taken = stacks.take(prefix, process.pid)
            assert taken.held
            assert "main_thread_holds" in functions(taken)
            line = of_script(taken.main)
            assert line is not None
            assert line.function == "main_thread_holds"
        os.truncate(f"{prefix}{WRITTEN}", HEAD + stacks.KEPT + 1)  # the file begins anew
        while (taken := stacks.take(prefix, process.pid)).missing:
            assert taken.missing.startswith("it has no time")
        assert Path(f"{prefix}{WRITTEN}").stat().st_size < HEAD + stacks.KEPT
        assert process.poll() is None


def test_a_process_of_a_parent_that_was_in_a_job_is_signalled(tmp_path: Path) -> None:
    """The parent ignores the signal from then on, and its children inherit that."""
    before = signal.getsignal(stacks.SIGNAL)
    try:
        StackServer(tmp_path / "parent").close()
        assert signal.getsignal(stacks.SIGNAL) is signal.SIG_IGN
        with running(tmp_path, "holds") as (prefix, process):
            while not (taken := stacks.take(prefix, process.pid)).held:
                pass
            assert "main_thread_holds" in functions(taken)
    finally:
        signal.signal(stacks.SIGNAL, before)


def test_a_frozen_process_is_left_alone(tmp_path: Path) -> None:
    with running(tmp_path, "works") as (prefix, process):
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        taken = stacks.take(prefix, process.pid)
        assert not taken.threads
        assert taken.native or "frozen (state T)" in taken.missing
        seen = processes.look(process.pid)
        assert seen is not None
        assert seen.frozen
        process.send_signal(signal.SIGCONT)
        assert finish(process) == 0


def test_a_process_that_has_ended_is_said_to(tmp_path: Path) -> None:
    with running(tmp_path, "sleeps") as (prefix, process):
        process.kill()
        process.wait()
        assert stacks.take(prefix, process.pid).missing == "it has no process"
        assert processes.look(process.pid) is None


def test_a_process_that_has_no_handler_gets_no_signal(tmp_path: Path) -> None:
    """The default of that signal would end it."""
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not processes.catches(process.pid, process.pid, stacks.SIGNAL)
        found = stacks.take(tmp_path / "none", process.pid)
        assert found.native or "ftcomm.init()" in found.missing, "py-spy sends no signal either"
        (written := tmp_path / "written").touch()  # as by one that had a handler
        assert not list(stacks._signalled(written, process.pid, [process.pid]))
        assert process.poll() is None


@pytest.mark.parametrize(
    "said", [b"", b"{}", b'{"pid":1,"threads":[]}', b"\xff" * 100, b"[" * 100_000, b"x" * (5 << 20)]
)
def test_answers_that_are_none_are_told(tmp_path: Path, said: bytes) -> None:
    prefix = tmp_path / "rank"

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(said)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{prefix}{SOCKET}")
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        taken = stacks.take(prefix, os.getpid())
        thread.join()
    assert "does not answer as a rank does" in taken.missing


def test_the_time_of_the_garbage_collector_is_counted(tmp_path: Path) -> None:
    with running(tmp_path, "works") as (prefix, process):
        while stacks.collected(prefix) <= 0.0:
            assert process.poll() is None
        assert finish(process) == 0


def test_all_threads_but_the_one_that_asks_are_seen() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="waits")
    thread.start()
    found: list[str] = []
    asks = threading.Thread(target=lambda: found.extend(stack.name for stack in here()), name="asks")
    asks.start()
    asks.join()
    over.set()
    thread.join()
    assert found[0] == "MainThread"
    assert "waits" in found
    assert "asks" not in found


@pytest.mark.parametrize("closed", [False, True])
def test_another_handler_of_the_signal_is_left_in_place(tmp_path: Path, closed: bool) -> None:
    """Nor does a script do harm that has `closed` descriptors which it had not opened."""

    def other(*args: object) -> None: ...

    before = signal.signal(stacks.SIGNAL, other)
    try:
        server = StackServer(tmp_path / "rank")
        if closed:
            os.close(server._listener.fileno())
        server.close()
        server.close()
        assert signal.getsignal(stacks.SIGNAL) is other
    finally:
        signal.signal(stacks.SIGNAL, before)


def test_a_hundred_stacks_do_no_harm(tmp_path: Path) -> None:
    with running(tmp_path, "works") as (prefix, process):
        did = harass(prefix, process, 100, 0.0)
        assert did["asked"], did
        assert did["signalled, running"], did
        assert finish(process) == 0


def test_a_stack_is_read_when_its_last_line_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that gets no CPU for a while stops between two lines."""
    written, blocked = tmp_path / "written", threading.Event()
    writers: list[threading.Thread] = []

    def write(pid: int, thread: int) -> bool:
        def lines() -> None:
            with open(written, "ab", buffering=0) as file:
                file.write(b"Stack (most recent call first):\n")
                time.sleep(0.2)
                file.write(b'  File "train.py", line 3 in step\n')
            blocked.clear()

        blocked.set()
        writers.append(threading.Thread(target=lines))
        writers[0].start()
        return True

    written.write_bytes(bytes(HEAD))
    monkeypatch.setattr(stacks, "signal_thread", write)
    monkeypatch.setattr(processes, "catches", lambda *thread: not blocked.is_set())
    (found,) = stacks._signalled(written, 1, [1])
    writers[0].join()
    assert [str(frame) for frame in found.frames] == ["train.py:3 step"]
