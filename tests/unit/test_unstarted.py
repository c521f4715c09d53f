"""A rank that cannot start, and whom the coordinator tells why."""

from __future__ import annotations

import msgspec
import pytest

from ftcomm.control import messages as m
from ftcomm.control.coordinator import Action, Close, Coordinator, Log, Send
from ftcomm.control.handshake import LONGEST_FIELD
from tests.coordinator_script import TIMEOUTS, Script, joins

WRONG = "rank 0 of replica 1 cannot start: FTCOMM_TRANSPORT='bogus'"


def forming(replicas: int = 3) -> Coordinator:
    """Replica 0 waits for the others, none of which is here."""
    coordinator = Coordinator(replicas, 1, TIMEOUTS, [], now=0.0, lifetime=1)
    coordinator.receive(0, joins(0), 1.0)
    return coordinator


def told(actions: list[Action]) -> dict[int, str]:
    return {x.conn: x.message.reason for x in actions if isinstance(x, Send) and isinstance(x.message, m.Expelled)}


def asks(coordinator: Coordinator, replica: int, lived: float, now: float) -> str:
    """Why a process of a replica waits in vain, which has run for so long; "" if it may hope. It is answered once."""
    actions = coordinator.asked(99, replica, lived, now)
    assert actions[-1] == Close(99)
    return told(actions).get(99, "")


@pytest.mark.parametrize("lasting", [True, False])
def test_all_that_wait_are_told_and_those_that_begin_later_wait_anew(lasting: bool) -> None:
    """A setting stays as wrong when the rank is started again; what the system lacked may be there then, so others
    wait."""
    coordinator = forming()
    actions = coordinator.unstarted(1, WRONG, lasting, {0: 0, 5: 1, 6: 2}, 10.0)
    assert told(actions) == ({0: WRONG, 5: WRONG} if lasting else {5: WRONG})
    assert [x.fields.get("hopeless", False) for x in actions if isinstance(x, Log)] == [lasting]
    assert (len(coordinator.joiners) == 0) == lasting
    assert asks(coordinator, 1, lived=3.0, now=12.0) == WRONG  # it ran when that was said
    assert asks(coordinator, 1, lived=3.0, now=1012.0) == ""
    assert asks(coordinator, 2, lived=3.0, now=12.0) == (WRONG if lasting else "")
    assert asks(coordinator, 2, lived=3.0, now=14.0) == ""
    coordinator.unstarted(1, WRONG, lasting, {}, 13.0)
    assert asks(coordinator, 1, lived=3.0, now=14.0) == WRONG  # it has been said again


def test_who_starts_in_the_end_is_no_reason_for_others_to_end() -> None:
    coordinator = forming()
    coordinator.unstarted(1, WRONG, True, {}, 10.0)
    coordinator.receive(1, joins(1, "second life"), 20.0)
    assert asks(coordinator, 2, lived=60.0, now=21.0) == ""


def test_a_job_that_has_begun_loses_nobody_by_a_rank_that_cannot_start() -> None:
    script = Script(2)
    script.lose(1)
    script.install(0)
    actions = script.coordinator.unstarted(1, WRONG, True, {0: 0, 11: 1}, 10.0)
    assert told(actions) == {11: WRONG}
    assert not any(x.fields.get("hopeless") for x in actions if isinstance(x, Log))
    assert asks(script.coordinator, 0, lived=60.0, now=11.0) == ""


@pytest.mark.parametrize("begun", [True, False])
def test_another_process_with_the_number_of_a_replica_ends_nobody(begun: bool) -> None:
    """Somebody starts a second replica 0, with a mistake, beside the one that is here."""
    coordinator = Script(2).coordinator if begun else forming(2)
    assert told(coordinator.unstarted(0, WRONG, True, {0: 0, 7: 1}, 10.0)) == {}
    assert asks(coordinator, 0, lived=60.0, now=11.0) == ""


def test_nobody_waits_for_a_replica_that_there_is_none_of() -> None:
    coordinator = forming(2)
    assert told(coordinator.unstarted(98, WRONG, True, {0: 0}, 10.0)) == {}
    assert asks(coordinator, 1, lived=60.0, now=11.0) == ""


def test_a_new_coordinator_knows_no_old_word() -> None:
    assert asks(forming(), 1, lived=1e9, now=12.0) == ""


def test_a_hostile_reason_is_one_line_that_can_be_sent() -> None:
    """Its terminal codes would be carried out where the others print their errors."""
    coordinator = forming(16)
    for replica in range(1, 16):
        text = f"\x1b[2Jfree the disk:\n\x07{chr(0x1F600) * 5000}"[:LONGEST_FIELD]
        actions = coordinator.unstarted(replica, text, False, {20: replica}, 10.0)
        assert told(actions)[20].isprintable()
        sent = [x.message for x in actions if isinstance(x, Send)]
        assert all(m.decode(m.encode(message)) == message for message in sent)
    assert msgspec.msgpack.encode(sent[-1]).count(chr(0x1F600).encode()) > 15 * 600
