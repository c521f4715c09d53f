"""Whose call it is, between the threads of one process."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from ftcomm.errors import ArgumentError
from ftcomm.process.turn import Turn


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


def test_nobody_goes_on_in_an_order_that_was_lost() -> None:
    """Else the next calls are matched with the wrong ones of other ranks, and nothing says so."""
    turn: Turn[Op] = Turn(lambda op: op.over)
    first = Op()
    series = turn.start(first)
    first.over = True
    entered, leave = threading.Event(), threading.Event()
    other: list[BaseException] = []

    def call(op: Op) -> None:
        entered.set()
        assert leave.wait(60)

    def blocking() -> None:
        try:
            turn.run(call, Op())
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
    series.check()  # the refusal itself is no op that anybody came between

    def refused() -> None:
        with pytest.raises(ArgumentError, match="behind the next step boundary"):
            turn.start(Op())
        with pytest.raises(ArgumentError, match="behind the next step boundary"):
            turn.run(lambda op: None, Op())

    refused()
    in_a_thread(refused)
    turn.agree()
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
    turn.agree()

    def after() -> None:
        turn.start(Op()).check()

    in_a_thread(after)


def at(code: Any, moment: str, happens: Callable[[int, FrameType], None]) -> Any:
    """A tracer for `sys.settrace`: at each `moment` (line, opcode) in functions with this `code`, with its number."""
    number = -1

    def inside(frame: FrameType, event: str, _: object) -> Any:
        nonlocal number
        if event == moment:
            number += 1
            happens(number, frame)
        return inside

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = moment == "opcode"
        return inside

    return trace


def meet(function: Any, before: int) -> tuple[bool, int, int]:
    """Two threads call, of which one has made the last call, and calls (`run`), or ends its call (`check`), while the
    other one is before some line of that function. Returns whether there is such a line, how many of the two were told,
    and how many ran at the same time."""
    turn: Turn[Op] = Turn(lambda op: op.over)
    turn.run(lambda op: None, Op())
    waits, goes_on = threading.Event(), threading.Event()
    paused, told, inside, most = False, 0, 0, 0

    def pause(number: int, _: FrameType) -> None:
        nonlocal paused
        if number == before:
            paused = True
            waits.set()
            assert goes_on.wait(60)

    def run(meanwhile: Callable[[], None]) -> None:
        nonlocal told

        def call(op: Op) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            meanwhile()
            inside -= 1

        try:
            turn.run(call, Op())
        except ArgumentError:
            told += 1

    def traced() -> None:
        sys.settrace(at(function.__code__, "line", pause))
        run(lambda: None)
        sys.settrace(None)
        waits.set()

    thread = threading.Thread(target=traced)

    def begin() -> None:
        thread.start()
        assert waits.wait(60)

    def let_go() -> None:
        goes_on.set()
        thread.join(60)

    if function is Turn.run:
        begin()
        run(let_go)
    else:
        run(begin)
    let_go()
    return paused, told, most


@pytest.mark.parametrize("function", [Turn.run, Turn.check])
def test_of_two_threads_at_the_same_time_both_are_told_wherever_one_of_them_is(function: Any) -> None:
    before, paused = 0, True
    while paused:
        paused, told, most = meet(function, before)
        assert most == 1, f"two calls ran at the same time, one of them from before line {before} on"
        assert told in (0, 2), f"before line {before} only one was told"
        before += 1
    assert before > 5


def interrupt(turn: Turn[Op], after: int) -> bool:
    """Raise `KeyboardInterrupt` in a call where the handler of a signal may: behind some call that it makes itself.
    Returns whether there is such a place."""
    calls, behind = 0, False

    def handle(_: int, frame: FrameType) -> None:
        nonlocal calls, behind
        if behind:
            calls += 1
            if calls > after:
                sys.settrace(None)
                raise KeyboardInterrupt
        behind = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("CALL")

    was = sys.gettrace()
    sys.settrace(at(Turn.run.__code__, "opcode", handle))
    try:
        turn.run(lambda op: None, Op())
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(was)
    return False


def test_an_interrupt_leaves_the_turn_to_others_wherever_it_comes() -> None:
    turn: Turn[Op] = Turn(lambda op: op.over)
    after = 0
    while interrupt(turn, after):
        in_a_thread(lambda: turn.run(lambda op: None, Op()))
        after += 1
    assert after > 3


def test_threads_that_call_one_after_the_other_have_an_order() -> None:
    turn: Turn[Op] = Turn(lambda op: op.over)
    called: list[str] = []

    def run(op: Op) -> None:
        called.append(threading.current_thread().name)
        turn.run(lambda op: None, op)  # inside another call of this thread

    for _ in range(3):
        in_a_thread(lambda: turn.run(run, Op()))
        turn.run(run, Op())
    assert len(called) == 6
    assert len(set(called)) == 4


def test_of_many_that_come_between_all_are_told_at_once_and_the_one_in_front_when_it_ends() -> None:
    turn: Turn[Op] = Turn(lambda op: op.over)
    told: list[str] = []

    def comes(blocks: bool) -> None:
        with pytest.raises(ArgumentError, match="called a collective of a group in which another"):
            turn.run(lambda op: None, Op()) if blocks else turn.start(Op())
        told.append(threading.current_thread().name)

    def call(op: Op) -> None:
        for blocks in (True, False, True, False):
            thread = threading.Thread(target=comes, args=(blocks,))
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), "it waits for the one in front"
            turn.agree()  # else the others are refused before they meet this call

    with pytest.raises(ArgumentError) as error:
        turn.run(call, Op())
    assert len(told) == 4
    assert repr(told[-1]) in str(error.value)
    turn.agree()
    in_a_thread(lambda: turn.run(lambda op: None, Op()))
