"""The copy-engine path on host memory, a thread a rank: every byte arrives, whoever is slow, and every wait ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftcomm.engines.gpu_kernel.copies import (
    AHEAD,
    ALL,
    CHANNELS,
    POSTED,
    SLOTS,
    TAKEN,
    WORDS,
    Copies,
    HostMover,
    PeerMemory,
    rounds,
)
from ftcomm.kernels.device.words import ABORTED, MOST_MEMBERS, OK, TIMED_OUT
from ftcomm.kernels.epochs import COUNTER

CHUNK = 64
LONG = 30.0


class SlowMover(HostMover):
    """Copies nothing before it has to, as a stream may, and takes its time at random."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._queued: list[tuple[int, int, int]] = []

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._queued.append((to, source, nbytes))

    def wait(self) -> None:
        time.sleep(float(self._random.choice([0, 0, 1e-4])))
        for queued in self._queued:
            super().copy(*queued)
        self._queued.clear()


class Ranks:
    def __init__(self, n: int, seed: int = 0, epoch: int = 3) -> None:
        self.words = [np.zeros(WORDS, np.uint64) for _ in range(n)]
        self.staging = [np.full(CHANNELS * SLOTS * CHUNK, 0xEE, np.uint8) for _ in range(n)]
        self.stopped = False
        self.epoch = epoch
        self.copies = [self.rank(me, SlowMover(seed + me)) for me in range(n)]

    def rank(self, me: int, mover: HostMover) -> Copies:
        ports = [
            PeerMemory(memoryview(words) if i == me else memoryview(words).toreadonly(), staging.ctypes.data)
            for i, (words, staging) in enumerate(zip(self.words, self.staging, strict=True))
        ]
        return Copies(me, ports, self.epoch, mover, lambda: self.stopped, CHUNK)

    def run(self, body: Callable[[int], int]) -> list[int]:
        """`body(me)` of all, at once; what they return. Whoever is not back after a minute is -1."""
        answers = [-1] * len(self.words)

        def one(me: int) -> None:
            answers[me] = body(me)

        threads = [threading.Thread(target=one, args=(me,), daemon=True) for me in range(len(self.words))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return answers


def gather(ranks: Ranks, sizes: list[int], seed: int) -> None:
    n = len(sizes)
    inputs = [np.random.default_rng((seed, i)).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)]
    outs = [[np.zeros(size + 1, np.uint8) for size in sizes] for _ in range(n)]

    def body(me: int) -> int:
        to = [out.ctypes.data for out in outs[me]]
        return ranks.copies[me].allgather(inputs[me].ctypes.data, to, sizes, LONG)

    assert ranks.run(body) == [OK] * n
    for mine in outs:
        for i in range(n):
            assert (mine[i][:-1] == inputs[i]).all()
            assert mine[i][-1] == 0  # not a byte too many


SIZES = st.lists(st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 7 * CHUNK + 5]), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(0, 1 << 30))
def test_allgather(data: st.DataObject, seed: int) -> None:
    sizes = data.draw(SIZES)
    ranks = Ranks(len(sizes), seed)
    for call in range(3):  # the counters go on, and slots are used again
        gather(ranks, data.draw(st.permutations(sizes)), seed + call)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(2, 4), st.lists(st.sampled_from([1, CHUNK, 5 * CHUNK + 3]), min_size=1, max_size=4), st.integers(0, 9)
)
def test_point_to_point_round_a_ring(n: int, sizes: list[int], seed: int) -> None:
    ranks = Ranks(n, seed)
    memory = [np.full((len(sizes), max(sizes)), me + 1, np.uint8) for me in range(n)]
    heard = [np.zeros((len(sizes), max(sizes)), np.uint8) for _ in range(n)]

    def body(me: int) -> int:
        for i, size in enumerate(sizes):
            status = OK
            for turn in ("send", "receive") if me % 2 == 0 else ("receive", "send"):
                if turn == "send" and not (n % 2 and me == n - 1):
                    status |= ranks.copies[me].send((me + 1) % n, memory[me][i].ctypes.data, size, LONG)
                elif turn == "receive" and not (n % 2 and me == 0):
                    status |= ranks.copies[me].receive((me - 1) % n, heard[me][i].ctypes.data, size, LONG)
            if status != OK:
                return status
        return OK

    assert ranks.run(body) == [OK] * n
    for me in range(n):
        for i, size in enumerate(sizes):
            expected = 0 if n % 2 and me == 0 else (me - 1) % n + 1  # in an odd ring one pair has to sit out
            assert (heard[me][i, :size] == expected).all()
            assert not heard[me][i, size:].any()


def test_channels_do_not_disturb_each_other() -> None:
    ranks = Ranks(3)
    small = np.arange(3 * CHUNK, dtype=np.uint8)
    heard = np.zeros_like(small)
    gather(ranks, [5 * CHUNK] * 3, 1)

    def pair(me: int) -> int:
        if me == 0:
            return ranks.copies[0].send(2, small.ctypes.data, small.size, LONG)
        return OK if me == 1 else ranks.copies[2].receive(0, heard.ctypes.data, heard.size, LONG)

    assert ranks.run(pair) == [OK] * 3
    assert (heard == small).all()
    gather(ranks, [3 * CHUNK + 1, 0, CHUNK], 2)


@given(
    st.lists(st.integers(0, 10 * CHUNK), max_size=4),
    st.lists(st.integers(0, 10 * CHUNK), max_size=4),
    st.integers(1, 4),
)
def test_rounds(sends: list[int], receives: list[int], ahead: int) -> None:
    plan = list(rounds(sends, receives, CHUNK, ahead))
    for sizes, side in ((sends, "puts"), (receives, "gets")):
        pieces = [piece for r in plan for piece in getattr(r, side)]
        for i, size in enumerate(sizes):
            mine = [piece for piece in pieces if piece.transfer == i]
            assert [piece.step for piece in mine] == list(range(-(-size // CHUNK)))
            assert sum(piece.nbytes for piece in mine) == size
            assert all(piece.start == piece.step * CHUNK and 0 < piece.nbytes <= CHUNK for piece in mine)
    for r in plan:
        assert len({piece.step for piece in r.puts} | {piece.step + ahead for piece in r.gets}) <= 1


def test_slots_are_enough_for_what_is_put_ahead() -> None:
    assert 1 <= AHEAD < SLOTS


@pytest.mark.parametrize("alive", [0, 3])
def test_a_wait_ends_when_told(alive: int) -> None:
    """One of three is not there, or goes after some pieces; the others wait for it until they are told to stop."""
    ranks = Ranks(3)
    sizes = [8 * CHUNK] * 3
    memory = [np.zeros((3, 8 * CHUNK), np.uint8) for _ in range(3)]
    for piece in range(alive):
        ranks.words[2][POSTED + ALL] = 3 << COUNTER | piece + 1
        for owner in (0, 1):
            ranks.words[2][TAKEN + 2 * owner] = 3 << COUNTER | piece + 1

    def body(me: int) -> int:
        if me == 2:
            time.sleep(0.05)
            ranks.stopped = True
            return OK
        to = [row.ctypes.data for row in memory[me]]
        return ranks.copies[me].allgather(memory[me][me].ctypes.data, to, sizes, LONG)

    assert ranks.run(body) == [ABORTED, ABORTED, OK]


def test_a_wait_has_a_deadline() -> None:
    ranks = Ranks(2)
    memory = np.zeros(CHUNK, np.uint8)
    assert ranks.copies[0].receive(1, memory.ctypes.data, CHUNK, 0.02) == TIMED_OUT
    assert ranks.copies[0].send(1, memory.ctypes.data, CHUNK, 0.02) == TIMED_OUT


@pytest.mark.parametrize("epoch", [2, 4])
def test_words_of_another_epoch_satisfy_nobody(epoch: int) -> None:
    ranks = Ranks(2)
    ranks.words[1][:] = epoch << COUNTER | 100
    memory = np.zeros(CHUNK, np.uint8)
    assert ranks.copies[0].receive(1, memory.ctypes.data, CHUNK, 0.02) == TIMED_OUT
    assert ranks.copies[0].send(1, memory.ctypes.data, CHUNK, 0.02) == TIMED_OUT


def test_a_source_is_not_given_back_before_all_have_it() -> None:
    """`send` returns when the reader has said so, not when the slot is filled."""
    ranks = Ranks(2)
    memory = np.zeros(CHUNK, np.uint8)
    sent = threading.Event()

    def send() -> None:
        assert ranks.copies[0].send(1, memory.ctypes.data, CHUNK, LONG) == OK
        sent.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    while ranks.words[0][POSTED + 2] == 0:
        time.sleep(0.001)
    assert not sent.wait(0.05)
    assert ranks.copies[1].receive(0, memory.ctypes.data, CHUNK, LONG) == OK
    assert sent.wait(LONG)


def test_words_lie_beside_each_other() -> None:
    used = [POSTED + c for c in range(CHANNELS)] + [TAKEN + 2 * o + k for o in range(MOST_MEMBERS) for k in (0, 1)]
    assert sorted(used) == list(range(WORDS))


def test_slots_lie_beside_each_other() -> None:
    copies = Ranks(1).copies[0]
    used = {copies._slot(channel, task) for channel in range(CHANNELS) for task in range(3 * SLOTS)}
    assert used == set(range(0, CHANNELS * SLOTS * CHUNK, CHUNK))
