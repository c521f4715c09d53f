"""A rank that cannot start, and whom the coordinator tells why."""

from __future__ import annotations

import asyncio
import dataclasses
from bisect import bisect_left
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import ftcomm
from ftcomm.control import handshake
from ftcomm.control import messages as m
from ftcomm.control.coordinator import Coordinator
from ftcomm.control.coordinator_actions import Close, CoordinatorAction, Keep, Log, Send
from ftcomm.control.handshake import LONGEST_FIELD, Credentials
from ftcomm.control.links import ask
from ftcomm.control.server import CoordinatorServer
from ftcomm.control.store import ViewStore
from ftcomm.control.unstarted import ASKERS, HOPELESS, UNSTARTED, NamedRank, Unstarted, asking_times
from ftcomm.control.views import Addresses
from ftcomm.errors import SettingsError
from ftcomm.settings import unstarted
from tests.fuzz.choices import ADDRESS
from tests.fuzz.machines import TIMEOUTS as GIVEN_TIMEOUTS
from tests.rigs.asyncio_client import Conversation, open_socket
from tests.rigs.coordinator_script import TIMEOUTS, Script, joins
from tests.rigs.peers import DEADLINE

WRONG = "replica 1 shard 1 cannot start: FTCOMM_TRANSPORT='bogus'"


def rank(replica: int, shard: int = 0) -> NamedRank:
    """One of a replica of several ranks, whose leader is where it should be."""
    return NamedRank(replica, shard, f"host:{replica + 1}")


LEADERS = {0: rank(0), 5: rank(1), 6: rank(2)}  # by connection


def forming(replicas: int = 3, unstarted: Iterable[Unstarted] = ()) -> Coordinator:
    """Replica 0 waits for the others, none of which has joined."""
    coordinator = Coordinator(replicas, 1, TIMEOUTS, [], now=0.0, lifetime=1, unstarted=unstarted)
    coordinator.receive(0, joins(0), 1.0)
    return coordinator


def told(actions: list[CoordinatorAction]) -> dict[int, str]:
    return {x.conn: x.message.reason for x in actions if isinstance(x, Send) and isinstance(x.message, m.Removed)}


def kept(actions: list[CoordinatorAction]) -> list[tuple[Unstarted, ...]]:
    return [x.reports for x in actions if isinstance(x, Keep)]


def asks(coordinator: Coordinator, who: NamedRank, lived: float, now: float) -> str:
    """Why a process waits in vain, which has run for so long; "" if it may hope. It is answered once."""
    actions = coordinator.asked(99, who, lived, now)
    assert actions[-1] == Close(99)
    return told(actions).get(99, "")


@pytest.mark.parametrize("lasting", [True, False])
def test_all_that_wait_are_told_and_those_that_begin_later_wait_anew(lasting: bool) -> None:
    """A setting stays as wrong when the rank is started again; what the system lacked may be there then, so others
    wait."""
    coordinator = forming()
    actions = coordinator.unstarted(rank(1, 1), WRONG, lasting, LEADERS, 10.0)
    assert told(actions) == ({0: WRONG, 5: WRONG} if lasting else {5: WRONG})
    assert [x.fields.get("hopeless", False) for x in actions if isinstance(x, Log)] == [lasting]
    assert (len(coordinator.joiners) == 0) == lasting
    assert asks(coordinator, rank(1), lived=3.0, now=12.0) == WRONG  # it ran when that was said
    assert asks(coordinator, rank(1), lived=3.0, now=1012.0) == ""
    assert asks(coordinator, rank(2), lived=3.0, now=12.0) == (WRONG if lasting else "")
    assert asks(coordinator, rank(2), lived=3.0, now=14.0) == ""
    coordinator.unstarted(rank(1, 1), WRONG, lasting, {}, 13.0)
    assert asks(coordinator, rank(1), lived=3.0, now=14.0) == WRONG  # it has been said again


def test_who_starts_in_the_end_is_no_reason_for_others_to_end() -> None:
    coordinator = forming()
    coordinator.unstarted(rank(1, 1), WRONG, True, {}, 10.0)
    actions = coordinator.receive(1, joins(1, "second life"), 20.0)
    assert kept(actions) == [()]  # a coordinator that is restarted knows no more of it either
    assert asks(coordinator, rank(2), lived=60.0, now=21.0) == ""


def test_a_job_that_has_begun_loses_nobody_by_a_rank_that_cannot_start() -> None:
    script = Script(2)
    script.lose(1)
    script.install(0)
    actions = script.coordinator.unstarted(rank(1, 1), WRONG, True, {0: rank(0), 11: rank(1)}, 10.0)
    assert told(actions) == {11: WRONG}
    assert not any(x.fields.get("hopeless") for x in actions if isinstance(x, Log))
    assert asks(script.coordinator, rank(0), lived=60.0, now=11.0) == ""


@pytest.mark.parametrize("begun", [True, False])
def test_another_process_with_the_number_of_a_replica_ends_nobody(begun: bool) -> None:
    """Somebody starts a second replica 0, with a mistake, beside the one that is here."""
    coordinator = Script(2).coordinator if begun else forming(2)
    assert told(coordinator.unstarted(rank(0, 1), WRONG, True, {0: rank(0), 7: rank(1)}, 10.0)) == {}
    assert asks(coordinator, rank(0), lived=60.0, now=11.0) == ""


@pytest.mark.parametrize("right", [NamedRank(1, 0), rank(1)])
@pytest.mark.parametrize("wrong", [NamedRank(1, 0), NamedRank(1, 0, "host:2"), NamedRank(1, 1, "elsewhere:2")])
def test_it_ends_nobody_that_has_the_number_by_right_and_has_not_joined_yet(right: NamedRank, wrong: NamedRank) -> None:
    """The second replica 1 has its leader elsewhere, or its number in the replica is that of the leader that is here.
    So what cannot start is no rank that this leader waits for."""
    coordinator = forming()
    assert told(coordinator.unstarted(wrong, WRONG, True, {0: rank(0), 5: right}, 10.0)) == {}
    assert len(coordinator.joiners) == 1
    assert asks(coordinator, right, lived=60.0, now=11.0) == ""
    assert asks(coordinator, rank(2), lived=60.0, now=11.0) == ""
    coordinator.unstarted(wrong, WRONG, True, {0: rank(0)}, 12.0)  # the right one has run for long, and comes only now
    assert asks(coordinator, right, lived=60.0, now=13.0) == ""


def test_nobody_waits_for_a_replica_that_there_is_none_of() -> None:
    coordinator = forming(2)
    assert told(coordinator.unstarted(rank(98, 1), WRONG, True, {0: rank(0)}, 10.0)) == {}
    assert asks(coordinator, rank(1), lived=60.0, now=11.0) == ""


def test_a_restarted_coordinator_knows_what_was_said_to_the_one_before(tmp_path: Path) -> None:
    """Nobody says it again: who cannot start has ended. What a process says that has started since is over."""
    store = ViewStore(tmp_path / "views")
    store.open()
    (reports,) = kept(forming().unstarted(rank(1, 1), WRONG, False, {}, 10.0))
    store.keep(reports)
    store.close()
    later = ViewStore(tmp_path / "views")
    later.open()
    assert later.reports == reports
    coordinator = forming(unstarted=later.reports)
    assert asks(coordinator, rank(1, 2), lived=3.0, now=12.0) == WRONG
    assert asks(coordinator, rank(1, 2), lived=1.0, now=12.0) == ""
    later.keep(())
    assert [path.name for path in tmp_path.iterdir()] == ["views"]
    later.close()


@pytest.mark.parametrize(
    "bad", [b"", b"{}", b"[1]", b"\xff", b'{"boot": "another kernel, another clock", "reports": []}']
)
def test_what_is_kept_and_is_not_good_counts_as_nothing(tmp_path: Path, bad: bytes) -> None:
    (tmp_path / "views.unstarted").write_bytes(bad)
    store = ViewStore(tmp_path / "views")
    store.open()
    assert store.reports == ()
    store.close()


def test_reports_of_another_kernel_are_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock has another beginning, so who ran when that was said is not known."""
    store = ViewStore(tmp_path / "views")
    store.open()
    store.keep((Unstarted(rank(1, 1), WRONG, True, 10.0),))
    store.close()
    monkeypatch.setattr("ftcomm.control.store.boot", lambda: "another")
    store.open()
    assert store.reports == ()
    store.close()


def test_a_large_replica_asks_no_more_often_than_a_small_one() -> None:
    """Its leader is missing: all its ranks wait, and none of them hears anything but by asking."""
    assert asking_times(0, 1, 10.0) == (0.0, 10.0)
    assert asking_times(1, 2, 10.0) == (10.0, 10.0)
    for ranks in (2, 9, 10, 64, 2048):
        times = sorted(
            first + pause * n
            for first, pause in (asking_times(x, ranks, 10.0) for x in range(1, ranks))
            for n in range(99)
        )
        times = [x for x in times if x < 99 * 10.0]  # from then on only slow ones are listed
        assert times[0] == 10.0
        most = max(bisect_left(times, x + 10.0) - at for at, x in enumerate(times))
        assert min(ranks - 1, ASKERS) <= most <= ASKERS + 1, ranks


def test_a_hostile_reason_is_one_line_that_can_be_sent() -> None:
    """Its terminal codes would be carried out where the others print their errors."""
    coordinator = forming(16)
    for replica in range(1, 16):
        text = f"\x1b[2Jfree the disk:\n\x07{chr(0x1F600) * 5000}"[:LONGEST_FIELD]
        actions = coordinator.unstarted(rank(replica, 1), text, False, {20: rank(replica)}, 10.0)
        assert told(actions)[20].isprintable()
        sent = [x.message for x in actions if isinstance(x, Send)]
        assert all(m.decode(m.encode(message)) == message for message in sent)
    assert msgspec.msgpack.encode(sent[-1]).count(chr(0x1F600).encode()) > 15 * 600


def test_a_coordinator_that_is_started_again_tells_who_asks(tmp_path: Path) -> None:
    credentials = Credentials("a token that is long enough")

    async def run() -> list[str]:
        said = []
        for reason in (WRONG, ""):
            server = CoordinatorServer(2, 2, credentials, store=tmp_path / "views", timeouts=TIMEOUTS)
            await server.start()
            at = ("127.0.0.1", int(server.endpoint.rpartition(":")[2]))
            if reason:
                await ask(at, credentials, UNSTARTED, {**rank(1, 1).fields, "reason": reason, "lasting": 0})
            answer = await ask(at, credentials, HOPELESS, {**rank(1, 0).fields, "lived": 3_600_000})
            assert isinstance(answer, m.Removed)
            said.append(answer.reason)
            await server.stop()
        return said

    assert asyncio.run(run()) == [WRONG, WRONG]


@pytest.mark.parametrize("letter", ["e", "\U0001f600"])
def test_a_long_reason_fits_into_an_opening(letter: str) -> None:
    """Cut where it is told, it is taken: four bytes a character, as the longest are."""
    mine, told = handshake.Credentials("a token that is long enough"), []

    def tell(there: object, credentials: object, purpose: str, fields: handshake.Fields, timeout: float) -> Any:
        told.append((purpose, fields))
        raise OSError("nobody is there")

    leader = f"{'h' * 100}:1"
    settings = SimpleNamespace(coordinator="127.0.0.1:1", replica=3, shard=1, ranks_per_replica=2, leader=leader)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unstarted.wire, "connect", tell)
        patch.setattr(unstarted.credentials, "of", lambda settings: mine)
        unstarted.tell(ValueError(letter * 5000), settings)  # type: ignore[arg-type]
    purpose, fields = told[0]
    opening = next(handshake.client_steps(mine, purpose, fields))
    assert opening is not None
    assert len(opening) <= handshake.MAX_HANDSHAKE
    taken = msgspec.msgpack.decode(opening, type=handshake.Opening)
    assert handshake.text(taken.fields, "reason") == f"replica 3 shard 1 cannot start: {letter * 5000}"[:598]
    assert NamedRank.read(taken.fields) == NamedRank(3, 1, leader)


@pytest.mark.usefixtures("time_for_handshakes")
def test_who_cannot_start_says_so_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader of its replica waits for all its ranks, and another replica for this one."""
    token, timeouts = "a token that is long enough", dataclasses.astuple(GIVEN_TIMEOUTS)
    mine = handshake.Credentials(token)

    async def said(talk: Conversation) -> m.AnyMessage | None:
        while isinstance(message := await talk.heard(), m.Ping):
            pass
        return message

    async def run() -> None:
        events: list[dict[str, object]] = []
        server = CoordinatorServer(2, 2, mine, timeouts=GIVEN_TIMEOUTS, on_event=events.append)
        await server.start()
        try:
            port = int(server.endpoint.rpartition(":")[2])
            heard = []
            for replica in (0, 1):
                channel = await open_socket(
                    ("127.0.0.1", port), mine, "leader", NamedRank(replica, 0, f"there:{replica + 1}").fields
                )
                talk = await Conversation.over(channel)
                if replica == 0:
                    join = m.Join(0, "life", Addresses.of((ADDRESS, ADDRESS)), 0, -1, timeouts)
                    talk.write(m.encode(join))
                    assert isinstance(await said(talk), m.Queued)
                heard.append(talk)
            env = {"COORDINATOR": f"127.0.0.1:{port}", "TOKEN": token, "REPLICA": "1", "REPLICAS": "1998", "SHARD": "1"}
            env["LEADER"] = "there:2"
            for name, value in env.items():
                monkeypatch.setenv(f"FTCOMM_{name}", value)
            with pytest.raises(SettingsError, match="1998 replicas; a job has at most"):
                await asyncio.to_thread(ftcomm.init)
            other, sibling = [await said(talk) for talk in heard]
            assert isinstance(sibling, m.Removed)
            assert sibling.reason.startswith("replica 1 shard 1 cannot start: FTCOMM_REPLICAS and")
            assert other == sibling
            assert [event["reason"] for event in events if event["kind"] == "refused"] == [sibling.reason]
        finally:
            await server.stop()

    asyncio.run(asyncio.wait_for(run(), DEADLINE))
