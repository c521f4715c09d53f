"""Whose call it is, between the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ftcomm.errors import ArgumentError
from ftcomm.turn import Turn


class Op:
    over = False


def in_a_thread(body: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not errors, errors


def test_who_was_refused_may_go_on_when_the_other_is_done() -> None:
    """The refusal itself is no op that anybody came between."""
    turn: Turn[Op] = Turn(lambda op: op.over)
    first = Op()
    series = turn.start(first)
    first.over = True
    entered, leave = threading.Event(), threading.Event()
    other: list[BaseException] = []

    def blocking() -> None:
        assert turn.enter()
        entered.set()
        assert leave.wait(60)
        try:
            turn.leave()
        except ArgumentError as error:
            other.append(error)

    thread = threading.Thread(target=blocking)
    thread.start()
    assert entered.wait(60)
    with pytest.raises(ArgumentError, match="in which another thread was in one"):
        turn.start(Op())
    leave.set()
    thread.join(60)
    assert len(other) == 1, "both are told"
    series.check()
    for _ in range(3):
        op = Op()
        again = turn.start(op)
        op.over = True
        again.check()


def test_who_comes_between_ops_in_flight_is_refused_and_their_thread_is_told() -> None:
    turn: Turn[Op] = Turn(lambda op: op.over)
    op = Op()
    series = turn.start(op)

    def between() -> None:
        with pytest.raises(ArgumentError):
            turn.start(Op())

    in_a_thread(between)
    with pytest.raises(ArgumentError):
        series.check()
    op.over = True

    def after() -> None:
        turn.start(Op()).check()

    in_a_thread(after)
