"""A leader that no op misses, and without whose word no change of membership begins: when it is a stall, and that no
other is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import pytest

from ftcomm.control import messages as m
from tests.rigs.coordinator_script import TIMEOUTS, Script

LIMIT = TIMEOUTS.op + TIMEOUTS.grace
MUTE = TIMEOUTS.silence  # until a leader counts as mute
AFTER = LIMIT + MUTE + 2 * TIMEOUTS.beat


def unsaid(ranks: int = 2, joiner: bool = True) -> Script:
    """Of three, 1 is lost, and 2 does not say that it runs in the view without it. Another life of 1 waits to join."""
    script = Script(3, ranks)
    script.lose(1)
    script.install(0)
    if joiner:
        script.join_ready(11)
    return script


def go_on(script: Script, seconds: float, speak: Collection[int] = (0, 11), answer: Collection[int] = (2,)) -> None:
    """Some speak, and of others the kernel answers."""
    for _ in range(round(seconds / TIMEOUTS.beat)):
        script.now += TIMEOUTS.beat
        for conn in speak:
            if conn in script.coordinator.links:
                script.tell(conn, m.Heartbeat(4 if conn < 10 else -1))
        for conn in answer:
            script.coordinator.acknowledged(conn, script.now)
        script.tick()


def test_it_is_a_stall_after_the_time_that_an_op_may_take() -> None:
    script = unsaid()
    go_on(script, LIMIT)
    assert script.newest[0] == (0, 2)
    go_on(script, MUTE + 2 * TIMEOUTS.beat)
    assert script.newest[0] == (0,)
    assert re.match(r"lost 2: a change of membership waits for it; its leader, a process", script.views[-1].why)
    script.install(0)
    script.promise(0)
    assert script.newest[0] == (0, 1), "and the change is made"


def test_the_time_counts_in_which_any_joiner_waits_though_it_goes_and_another_life_comes() -> None:
    """It waits for as long as its init timeout, which may be less than that of an op."""
    script = unsaid()
    go_on(script, 0.6 * LIMIT + MUTE)
    script.cut(11)
    go_on(script, LIMIT, speak=(0,))
    assert script.newest[0] == (0, 2)
    script.join_ready(21)
    go_on(script, 0.2 * LIMIT, speak=(0, 21))
    assert script.newest[0] == (0, 2)
    go_on(script, 0.4 * LIMIT, speak=(0, 21))
    assert script.newest[0] == (0,)


def heals(script: Script) -> None:
    """Its path to the coordinator is cut for long. Its kernel is heard first, then its leader."""
    go_on(script, 3 * AFTER, answer=())
    go_on(script, LIMIT / 2)


def forgotten(script: Script) -> None:
    """A firewall has forgotten its connection alone: its port answers, and so its host is there."""
    go_on(script, 3 * AFTER, answer=())
    for _ in range(round(3 * AFTER / TIMEOUTS.beat)):
        go_on(script, TIMEOUTS.beat, answer=())
        script.coordinator.known.detector.acknowledged(2, script.now)


def away(script: Script) -> None:
    """It has no connection, and its port answers."""
    script.cut(2)
    go_on(script, 3 * AFTER)


def suspended(script: Script) -> None:
    """All are, and go on one after the other."""
    go_on(script, 3 * AFTER, speak=(), answer=(0, 2, 11))
    go_on(script, LIMIT / 2)


def paused(script: Script) -> None:
    """All are, and the coordinator as well."""
    go_on(script, LIMIT - MUTE)
    script.now += 3 * AFTER
    go_on(script, LIMIT / 2)


def slow(script: Script) -> None:
    """It speaks, seldom: each time just before that would be too late."""
    for _ in range(3):
        go_on(script, LIMIT)
        script.tell(2, m.Heartbeat(4))


def idle(script: Script) -> None:
    """Nobody waits for it but for a short time: one that joins goes again."""
    script.cut(11)
    go_on(script, 3 * AFTER, speak=(0,))
    script.join_ready(11)
    go_on(script, LIMIT / 2)


def cut_off(script: Script) -> None:
    """The coordinator is, again and again: those that contribute are not heard for a while."""
    for _ in range(4):
        go_on(script, LIMIT / 2)
        go_on(script, 2 * TIMEOUTS.silence, speak=())


@pytest.mark.parametrize(
    "how", [heals, forgotten, away, suspended, paused, slow, idle, cut_off], ids=lambda x: x.__name__
)
def test_none_that_is_whole_is_removed(how: Callable[[Script], None]) -> None:
    script = unsaid()
    how(script)
    assert script.newest[0] == (0, 2)


@pytest.mark.parametrize(
    ("ranks", "joiner"), [(1, True), (2, False)], ids=["its script holds the interpreter", "nobody waits"]
)
def test_it_may_take_its_time(ranks: int, joiner: bool) -> None:
    """An op will miss the first, and nothing misses the second."""
    script = unsaid(ranks, joiner)
    go_on(script, 3 * AFTER, answer=(2, 11))
    assert script.newest[0] == (0, 2)


def test_the_last_one_to_hold_the_state_stays() -> None:
    """It has lost all others, and those that wait to join are no witness."""
    script = Script(2, 2)
    script.lose(1)
    script.join_ready(11)
    go_on(script, 3 * AFTER, speak=(11,), answer=(0,))
    assert script.newest[0] == (0,)
    assert not script.done


def test_one_that_speaks_while_another_is_awaited_as_well_is_none() -> None:
    """Both have not said it: the change waits for the one that lives, too."""
    script = Script(4, 2)
    script.lose(1)
    script.install(0)
    script.join_ready(11)
    go_on(script, 3 * AFTER, speak=(0, 3, 11))
    assert script.newest[0] == (0, 2, 3)
    script.install(3)
    go_on(script, TIMEOUTS.beat, speak=(0, 3, 11))
    assert script.newest[0] == (0, 3)
