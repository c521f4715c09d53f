"""The mark that a dead process leaves before it is gone, and who is woken by it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftcomm.sync import death_watch
from ftcomm.sync.death_watch import DeathWatch, MutexWord
from ftcomm.sync.robust_mutex import hold, owner_died
from ftcomm.sync.sched import _SYS_SCHED_SETATTR, SLICE, _Attributes, request_short_slice
from ftcomm.transport.segment import MUTEXES, Memory, Segment, mutex
from tests.rigs.deadlines import DEADLINE

pytestmark = pytest.mark.protocol


HOLDER = """
import ctypes, mmap, sys, time
from ftcomm.sync.robust_mutex import hold
memory = mmap.mmap(int(sys.argv[1]), 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
print(hold(address), flush=True)
time.sleep(60)
"""


class Page(Memory):
    """One page of words of somebody else, read-only as a peer maps it."""

    def __init__(self, fd: int) -> None:
        self._map(mmap.mmap(fd, 4096, prot=mmap.PROT_READ))

    def mutex(self) -> MutexWord:
        return MutexWord(self.words, 0, self.address)


class Holder:
    """A process that holds a mutex in the first word of `page`."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("life")
        os.ftruncate(self.fd, 4096)
        self.page = Page(self.fd)
        command = [sys.executable, "-c", HOLDER, str(self.fd)]
        self.process = subprocess.Popen(command, pass_fds=[self.fd], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.held = self.process.stdout.readline() == "True\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE)
        os.close(self.fd)


@contextlib.contextmanager
def holders(count: int) -> Iterator[list[Holder]]:
    started = [Holder() for _ in range(count)]
    try:
        if not all(holder.held for holder in started):
            pytest.skip("this C library lays out its mutexes in another way")
        yield started
    finally:
        for holder in started:
            holder.close()


@contextlib.contextmanager
def watcher() -> Iterator[tuple[DeathWatch[int], queue.Queue[int]]]:
    told: queue.Queue[int] = queue.Queue()
    eye = DeathWatch(told.put)
    try:
        yield eye, told
    finally:
        eye.close()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ftcomm-watch"]


def wait_asleep(name: str, count: int) -> None:
    """Until `count` threads of this process that are called `name` sleep in futex_waitv."""
    end = time.monotonic() + DEADLINE
    while True:
        threads = [thread.native_id for thread in threading.enumerate() if thread.name == name]
        calls = [Path(f"/proc/self/task/{thread}/syscall").read_text().split()[0] for thread in threads]
        if calls.count(str(death_watch._FUTEX_WAITV)) == count:
            return
        assert time.monotonic() < end, f"{len(threads)} threads, in the system calls {calls}"
        time.sleep(0.001)


def test_a_killed_process_leaves_its_mark() -> None:
    with holders(1) as [holder]:
        words = holder.page.words
        assert words[0] != 0
        assert not owner_died(words[0])
        holder.process.kill()
        end = time.monotonic() + DEADLINE
        while not owner_died(words[0]):
            assert time.monotonic() < end, "no mark"


def test_the_mark_of_a_thread_that_ends() -> None:
    """Why the control thread holds it, and not whoever calls `init`."""
    segment = Segment()
    with watcher() as (eye, told):
        go = threading.Event()
        held = threading.Event()

        def holder() -> None:
            hold(*(segment.address + 8 * mutex(reader) for reader in range(MUTEXES)))
            held.set()
            go.wait(DEADLINE)

        thread = threading.Thread(target=holder)
        thread.start()
        assert held.wait(DEADLINE)
        eye.watch(
            {
                reader: MutexWord(segment.words, mutex(reader), segment.address + 8 * mutex(reader))
                for reader in range(MUTEXES)
            }
        )
        wait_asleep("ftcomm-watch", 1)
        assert told.empty()
        go.set()
        assert sorted(told.get(timeout=DEADLINE) for _ in range(MUTEXES)) == list(range(MUTEXES))
        assert all(owner_died(segment.words[mutex(reader)]) for reader in range(MUTEXES))
        thread.join(DEADLINE)
    segment.close()


def test_every_watcher_of_a_process_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel wakes one, that one the others; none of them looks of its own accord."""
    monkeypatch.setattr(death_watch, "_MOST", 2)  # so that each has a thread of its own, as in other processes
    with contextlib.ExitStack() as stack:
        [victim, other] = stack.enter_context(holders(2))
        eyes = [stack.enter_context(watcher()) for _ in range(5)]
        pages = [(Page(victim.fd), Page(other.fd)) for _ in eyes]
        for (eye, _), (first, second) in zip(eyes, pages, strict=True):
            eye.watch({0: first.mutex(), 1: second.mutex()})
        wait_asleep("ftcomm-watch", 5)
        victim.process.kill()
        assert [told.get(timeout=DEADLINE) for _, told in eyes] == [0] * 5
        wait_asleep("ftcomm-watch", 5)
        other.process.kill()
        assert [told.get(timeout=DEADLINE) for _, told in eyes] == [1] * 5
        wait_asleep("ftcomm-watch", 5)
        assert all(told.empty() for _, told in eyes), "told twice"


def test_who_is_dead_already_is_told_once_for_each_key() -> None:
    with holders(1) as [holder], watcher() as (eye, told):
        holder.process.kill()
        holder.process.wait(DEADLINE)
        eye.watch({1: holder.page.mutex()})
        assert told.get(timeout=DEADLINE) == 1
        eye.watch({1: holder.page.mutex(), 2: holder.page.mutex()})
        assert told.get(timeout=DEADLINE) == 2
        wait_asleep("ftcomm-watch", 1)
        assert told.empty()


def test_memory_is_let_go_while_the_watcher_sleeps() -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:life")

    with holders(2) as [first, second], watcher() as (eye, told):
        eye.watch({1: first.page.mutex(), 2: second.page.mutex()})
        wait_asleep("ftcomm-watch", 1)
        before = mapped()
        del first.page
        assert mapped() == before, "unmapped under a sleeping watcher"
        eye.watch({2: second.page.mutex()})
        end = time.monotonic() + DEADLINE
        while mapped() != before - 1:
            assert time.monotonic() < end, "the watcher keeps memory that it does not watch"
            time.sleep(0.001)
        first.process.kill()
        first.process.wait(DEADLINE)
        second.process.kill()
        assert told.get(timeout=DEADLINE) == 2
        assert told.empty()


def test_the_thread_ends_when_asked() -> None:
    with holders(1) as [holder], watcher() as (eye, told):
        eye.watch({1: holder.page.mutex()})
        wait_asleep("ftcomm-watch", 1)
        [thread] = threads()
        eye.close()
        thread.join(DEADLINE)
        assert not thread.is_alive()
        eye.watch({1: holder.page.mutex()})
        assert told.empty()


def test_a_kernel_without_futex_waitv(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher gives up in silence; whoever is in the view is seen by other signs."""
    monkeypatch.setattr(death_watch, "_FUTEX_WAITV", 100_000)  # a system call that no kernel has
    with holders(1) as [holder], watcher() as (eye, told):
        eye.watch({1: holder.page.mutex()})
        for thread in threads():
            thread.join(DEADLINE)
        eye.watch({2: holder.page.mutex()})
        assert not threads(), "it is tried again and again"
        assert told.empty()


def test_a_sleep_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For want of memory, say. All groups of the process would hear of no death any more."""
    monkeypatch.setattr(death_watch, "_AGAIN", 0.01)
    sleep, fails = death_watch._waitv, [True]

    def waitv(*arguments: Any) -> int:
        if fails:
            fails.clear()
            ctypes.set_errno(errno.ENOMEM)
            return -1
        return int(sleep(*arguments))

    monkeypatch.setattr(death_watch, "_waitv", waitv)
    with holders(1) as [holder], watcher() as (eye, told):
        eye.watch({1: holder.page.mutex()})
        wait_asleep("ftcomm-watch", 1)
        holder.process.kill()
        assert told.get(timeout=DEADLINE) == 1
    assert "futex_waitv: Cannot allocate memory; it is tried again" in caplog.text


def test_groups_share_a_thread_and_hear_of_their_own_members_alone() -> None:
    with holders(2) as [first, second], watcher() as (one, told), watcher() as (two, told_too):
        one.watch({1: first.page.mutex(), 2: second.page.mutex()})
        two.watch({7: second.page.mutex()})
        wait_asleep("ftcomm-watch", 1)
        first.process.kill()
        assert told.get(timeout=DEADLINE) == 1
        one.close()
        wait_asleep("ftcomm-watch", 1)
        second.process.kill()
        assert told_too.get(timeout=DEADLINE) == 7
        assert told.empty()
        assert told_too.empty()


def test_a_defect_of_one_group_does_not_keep_others_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(key: int) -> None:
        raise ZeroDivisionError

    with holders(1) as [holder], watcher() as (eye, told):
        broken = DeathWatch(breaks)
        broken.watch({1: holder.page.mutex()})
        eye.watch({2: holder.page.mutex()})
        wait_asleep("ftcomm-watch", 1)
        holder.process.kill()
        assert told.get(timeout=DEADLINE) == 2
        wait_asleep("ftcomm-watch", 1)
        broken.close()
    assert "ZeroDivisionError" in caplog.text


def test_no_word_is_left_out_when_one_sleep_has_no_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(death_watch, "_MOST", 3)
    with holders(4) as held, watcher() as (one, told), watcher() as (two, told_too):
        pages = [holder.page for holder in held]
        one.watch({0: pages[0].mutex()})
        two.watch({3: pages[3].mutex()})
        wait_asleep("ftcomm-watch", 1)
        one.watch({number: pages[number].mutex() for number in range(3)})
        wait_asleep("ftcomm-watch", 2)
        for holder in held:
            holder.process.kill()
        assert sorted(told.get(timeout=DEADLINE) for _ in range(3)) == [0, 1, 2]
        assert told_too.get(timeout=DEADLINE) == 3
        one.watch({})
        one.close()
        two.close()
        for thread in threads():
            thread.join(DEADLINE)
        assert not threads()


def test_a_child_watches_with_a_thread_of_its_own() -> None:
    with holders(1) as [holder], watcher() as (eye, _):
        eye.watch({1: holder.page.mutex()})
        wait_asleep("ftcomm-watch", 1)
        with death_watch._all_watches:  # as another thread may hold it at the moment of the fork
            child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                signal.alarm(int(DEADLINE))
                heard: queue.Queue[int] = queue.Queue()
                mine = DeathWatch(heard.put)
                mine.watch({2: Page(holder.fd).mutex()})  # what the parent had mapped is none of the child's
                wait_asleep("ftcomm-watch", 1)
                os.kill(holder.process.pid, signal.SIGKILL)
                os._exit(0 if heard.get(timeout=DEADLINE) == 2 else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_only_who_asks_is_urgent() -> None:
    """Not the threads and processes that it starts: a rank must not take turns with others every 100 us."""

    def mine() -> tuple[int, int, int]:
        seen = _Attributes()
        number = _SYS_SCHED_SETATTR[platform.machine()] + 1  # sched_getattr comes after it
        assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(seen), ctypes.sizeof(seen), 0) == 0
        return seen.policy, seen.nice, seen.runtime

    def ask() -> None:
        told.append(mine())
        if not request_short_slice():
            return
        told.append(mine())
        child = threading.Thread(target=lambda: told.append(mine()))
        child.start()
        child.join(DEADLINE)

    told: list[tuple[int, int, int]] = []
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(DEADLINE)
    if len(told) == 1:
        pytest.skip("this kernel cannot be asked, or another policy was chosen for the tests")
    before, asked, child = told
    assert asked in ((*before[:2], SLICE), (*before[:2], 0))  # 0: an earlier kernel, which does not look at the number
    assert child == before
