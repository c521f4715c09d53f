"""Static groups: how they meet, what ends them, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, LostError, MismatchError, TransportError
from ftcomm.groups import static_endpoint as endpoint
from ftcomm.groups.communicator import Communicator
from ftcomm.groups.static_endpoint import Endpoint, parse
from ftcomm.groups.static_group import StaticGroup
from ftcomm.groups.static_pairs import FRAMES, Pairs
from ftcomm.membership import static
from ftcomm.membership.derived import Left
from ftcomm.transport import router
from tests.rigs.exchange import DEADLINE, Caller
from tests.rigs.static_ranks import (
    Ranks,
    mappings_of_segments,
    narrow,
    no_garbage_collection,
    nothing_left,
    returns_before_the_next,
    together,
)

pytestmark = pytest.mark.protocol

BIG = 400_000  # elements: several chunks


@pytest.fixture(autouse=True)
def _time_to_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take its time between the end of a connection for data and the message that says why."""
    monkeypatch.setattr(static, "DOUBT", DEADLINE)


def total(groups: list[StaticGroup], count: int = 1000) -> list[float]:
    """What an all-reduce of 2**rank gives to each."""

    def one(i: int) -> float:
        array = np.full(count, 2.0 ** groups[i].rank, np.float32)
        groups[i].allreduce(array)
        assert (array == array[0]).all()
        return float(array[0])

    return together(one, len(groups))


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not found():
        assert time.monotonic() < end
        time.sleep(0.001)


def reduce_forever(group: StaticGroup) -> None:
    while True:
        group.allreduce(np.zeros(BIG, np.float32))


@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 4])
@nothing_left
def test_all_take_part_and_nothing_is_left(transport: str, size: int) -> None:
    with Ranks(size) as ranks:
        groups = ranks.make("g", transport=transport)
        assert [group.rank for group in groups] == [*range(size)]
        assert {(group.world_size, group.roster, group.name, group.error) for group in groups} == {
            (size, tuple(range(size)), "g", None)
        }
        assert total(groups) == total(groups, BIG) == [2.0**size - 1] * size
        together(lambda i: groups[i].close(), size)
        for group in groups:
            with pytest.raises(FtcommError, match=r"group 'g', rank . was closed"):
                group.allreduce(np.zeros(1))
            group.close()  # again


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("ended_by", ["close", "abort", "stall"])
def test_the_memory_of_a_group_is_gone_when_it_is_closed_and_dropped(transport: str, ended_by: str) -> None:
    """Also where nobody collects garbage for long."""

    def use() -> None:
        groups = ranks.make("g", transport=transport, op_timeout=0.2 if ended_by == "stall" else DEADLINE)
        assert total(groups) == total(groups, BIG) == [3.0, 3.0]
        work = groups[0].allreduce(np.ones(5), async_op=True)
        if ended_by == "stall":
            with pytest.raises(CollectiveTimeout):
                work.wait()
        if ended_by == "abort":
            groups[0].abort()
        together(lambda i: groups[i].close(), 2)
        ranks.groups.clear()

    with Ranks(2) as ranks, no_garbage_collection():
        before = mappings_of_segments()
        use()
        until(lambda: mappings_of_segments() <= before)


def test_a_rank_is_in_several_groups_at_a_time() -> None:
    with Ranks(3) as ranks:
        everybody, pair, turned = ranks.make("a"), ranks.make("b", [0, 2]), ranks.make("c", [2, 1, 0])
        assert total(everybody) == [7.0] * 3
        assert total(pair) == [3.0] * 2
        together(lambda i: pair[i].close(), 2)
        assert total(turned) == total(everybody) == [7.0] * 3
        again = ranks.make("b", [1, 2])  # a name may be used again when the group is closed
        assert total(again) == [3.0] * 2


def test_groups_outlive_their_endpoints() -> None:
    with Ranks(2) as ranks:
        groups = ranks.make("g")
        for endpoint in ranks.endpoints:
            endpoint.close()
        assert total(groups) == [3.0, 3.0]
        with pytest.raises(TransportError, match="endpoint of group 'h' was closed"):
            StaticGroup.from_handles(ranks.endpoints[0], "h", ranks.handles, timeout=0.1)


def test_members_wait_for_those_who_come_late() -> None:
    with Ranks(3) as ranks:
        groups: dict[int, StaticGroup] = {}

        def make(i: int) -> None:
            groups[i] = StaticGroup.from_handles(ranks.endpoints[i], "g", ranks.handles, timeout=DEADLINE)

        early = [Caller.start(make, i) for i in (2, 1)]  # they dial 0, which has no such group yet
        until(lambda: len(ranks.endpoints[0].router._parked) == 2)
        assert not groups
        make(0)
        for caller in early:
            caller.join()
        ranks.groups += groups.values()
        assert total([groups[i] for i in range(3)]) == [7.0] * 3


# -- who does not come, and who should not -----------------------------------------------------------------------------


@nothing_left
def test_who_did_not_come_is_named() -> None:
    with Ranks(4) as ranks:
        ranks.endpoints[0].close()

        def make(i: int) -> str:
            with pytest.raises(TransportError) as raised:
                StaticGroup.from_handles(ranks.endpoints[i], "g", ranks.handles, timeout=3.0)
            return str(raised.value)

        two, three = together(lambda i: make(i + 2), 2)
        for text in (two, three):
            assert "rank 0 (127.0.0.1:" in text
            assert "did not come (it cannot be reached" in text
            assert "rank 1 (127.0.0.1:" in text
            assert "did not come (it listens, but has not made this group)" in text
        assert three.startswith("group 'g': rank 0 ")
    with Ranks(2) as ranks:
        with pytest.raises(TransportError, match=r"rank 1 .* did not come \(it has not called\)"):
            StaticGroup.from_handles(ranks.endpoints[0], "g", ranks.handles, timeout=0.1)
        assert total(ranks.make("g")) == [3.0, 3.0]  # the name is free again, and the handles are good


@nothing_left
def test_members_that_mean_different_groups_are_told() -> None:
    with Ranks(3) as ranks:
        handles = [ranks.handles, [ranks.handles[i] for i in (0, 2, 1)]]

        def make(i: int) -> str:
            with pytest.raises((ArgumentError, TransportError)) as raised:
                StaticGroup.from_handles(ranks.endpoints[i], "g", handles[i], timeout=DEADLINE)
            return str(raised.value)

        assert any("of other members, or in another order" in text for text in together(make, 2))


@pytest.mark.parametrize(
    ("handles", "said"),
    [
        (lambda all_: [all_[1]], "is not among its members"),
        (lambda all_: [all_[0], all_[0]], "a member is there twice"),
        (lambda all_: [all_[0], "ftcomm://127.0.0.1/x"], "is no handle of ftcomm"),
        (lambda all_: [all_[0], "ftcomm://127.0.0.1:70000/x"], "is no handle of ftcomm"),
        (lambda all_: [all_[0], 7], "a int is no handle of ftcomm"),
        (lambda all_: [], "is not among its members"),
    ],
)
@nothing_left
def test_wrong_members(handles: Any, said: str) -> None:
    """And no token is in the message, whatever was taken for a handle."""
    with Ranks(2) as ranks, pytest.raises(ArgumentError, match=said) as error:
        StaticGroup.from_handles(ranks.endpoints[0], "g", handles(ranks.handles))
    assert not any(parse(handle).token in str(error.value) for handle in ranks.handles)


@pytest.mark.parametrize("spoil", ["{}!", "{}/x", "x{}", "  {}", "{}\n"])
@nothing_left
def test_no_token_in_the_message_of_what_is_nearly_a_handle(spoil: str) -> None:
    with Ranks(1) as ranks:
        [handle] = ranks.handles
        place = parse(handle)
        assert place.token not in repr(place)
        for text in (spoil.format(handle), handle.removeprefix("ftcomm://"), handle.replace("//", "/"), place.token):
            with pytest.raises(ArgumentError, match=r"no handle of ftcomm.*ftcomm://host:port/token") as error:
                parse(text)
            assert place.token not in str(error.value)


@nothing_left
def test_wrong_arguments() -> None:
    with Ranks(2) as ranks:
        for arguments in ({"op_timeout": 0}, {"timeout": -1.0}, {"op_timeout": float("inf")}):
            with pytest.raises(ArgumentError, match="expected a positive number of seconds"):
                StaticGroup.from_handles(ranks.endpoints[0], "g", ranks.handles, **arguments)
        for name in ("", "x" * 201):
            with pytest.raises(ArgumentError, match="1 to 200 characters"):
                StaticGroup.from_handles(ranks.endpoints[0], name, ranks.handles)
        ranks.make("g")
        with pytest.raises(ArgumentError, match="has a group 'g' already"):
            StaticGroup.from_handles(ranks.endpoints[0], "g", ranks.handles)
        with pytest.raises(TransportError, match=r"cannot listen on 192\.0\.2\.1"):
            Endpoint("192.0.2.1")


def test_a_handle_with_another_token_is_named_at_the_deadline() -> None:
    with Ranks(2) as ranks:
        forged = ranks.handles[0].rpartition("/")[0] + "/guess"
        with pytest.raises(TransportError, match=r"did not come .*wrong token"):
            StaticGroup.from_handles(ranks.endpoints[1], "g", [forged, ranks.handles[1]], timeout=1.0)


# -- what ends a group -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@nothing_left
def test_abort_ends_it_for_all_and_the_handles_stay(transport: str) -> None:
    with Ranks(3) as ranks:
        for attempt in range(3):
            groups = ranks.make(f"g{attempt}", transport=transport)

            def run(i: int, groups: list[StaticGroup] = groups) -> str:
                if i == 1:
                    groups[1].abort("enough")
                with pytest.raises(LostError) as raised:
                    reduce_forever(groups[i])
                return str(raised.value)

            texts = together(run, 3)
            assert "rank 1 (127.0.0.1:" in texts[0]
            assert "has given up: it was aborted: enough; make a new group" in texts[0]
            assert "has given up: it was aborted: enough; make a new group" in texts[2]
            assert "rank 1: it was aborted: enough; make a new group" in texts[1]
            assert all(isinstance(group.error, LostError) for group in groups)
            together(lambda i, groups=groups: groups[i].close(), 3)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_an_op_that_not_all_call_times_out_and_ends_the_group(transport: str) -> None:
    with Ranks(3) as ranks:
        groups = ranks.make("g", transport=transport, op_timeout=0.5)

        def reduce(i: int) -> str:
            with pytest.raises((CollectiveTimeout, LostError)) as raised:
                groups[i].allreduce(np.zeros(10))
            return str(raised.value)

        texts = together(reduce, 2)
        assert any("op 0 has waited 0.5 s for " in text and "rank 2 (127.0.0.1" in text for text in texts)
        until(lambda: groups[2].error is not None)
        with pytest.raises(LostError, match=r"has given up: .* has waited"):
            groups[2].allreduce(np.zeros(10))


def test_seconds_in_which_nobody_runs_are_none_in_which_members_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 makes the group, and is stopped for an hour again and again before rank 1 does."""
    skew, now = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + skew[0])
    with Ranks(2) as ranks, ThreadPoolExecutor(1) as pool:
        make = functools.partial(StaticGroup.from_handles, timeout=10.0)
        early = pool.submit(make, ranks.endpoints[0], "g", ranks.handles)
        for _ in range(3):
            skew[0] += 3600.0
            time.sleep(0.6)  # it looks
            assert not early.done()
        ranks.groups.append(make(ranks.endpoints[1], "g", ranks.handles))
        ranks.groups.append(early.result(60.0))
        sums = together(lambda i: float(ranks.groups[i].allreduce(np.ones(3))[0]), 2)
        assert sums == [2.0, 2.0]


def test_a_group_says_on_which_replicas_it_waits() -> None:
    with Ranks(3) as ranks:
        groups = ranks.make("g")
        assert groups[0].internals.waiting(0.0) is None
        work = groups[0].allreduce(np.zeros(10), async_op=True)
        assert groups[0].internals.waiting(0.0) is None  # without a job there are none
        groups[0].internals._membership._replicas = (7, 7, 9)  # else nobody in this process is in a job
        until(lambda: groups[0].internals.waiting(0.01) == (0, (7, 9)))
        assert groups[0].internals.waiting(DEADLINE) is None
        together(lambda i: groups[i + 1].allreduce(np.zeros(10)), 2)
        work.wait()
        assert groups[0].internals.waiting(0.0) is None


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@nothing_left
def test_ops_that_have_returned_somewhere_return_everywhere(transport: str) -> None:
    """Whoever closes the group at once after an op takes nothing from the others, who may not have seen its end."""
    with Ranks(3) as ranks:
        for attempt in range(15):
            groups = ranks.make(f"g{attempt}", transport=transport)

            def ends(i: int, groups: list[StaticGroup] = groups) -> None:
                for _ in range(3):
                    array = np.ones(5, np.float32)
                    assert (groups[i].allreduce(array) == 3).all()
                groups[i].close()

            together(ends, 3)
        left, stays = ranks.make("two", [0, 1], transport=transport)
        assert total([left, stays]) == [3.0, 3.0]
        left.close()
        with pytest.raises(LostError, match=r"rank 0 \(.*\) has closed the group"):
            stays.allreduce(np.zeros(5))
        stays.close()


@pytest.mark.parametrize("data", ["none", "mac", "aes-gcm"])
def test_no_op_waits_behind_the_next(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever protects the data: of a record a part is sent, which has bytes of the next op."""
    narrow(monkeypatch)
    monkeypatch.setenv("FTCOMM_DATA", data)
    with Ranks(2) as ranks:
        returns_before_the_next(*ranks.make("g", transport="tcp"))


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@nothing_left
def test_close_in_the_middle_of_ops(transport: str) -> None:
    """Whatever number of ops one has seen return when it closes: the others see as many or more, and all of them the
    same, though one may have returned an op when another hears that the first has left."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with Ranks(3) as ranks:
        for attempt in range(10):
            groups = ranks.make(f"g{attempt}", transport=transport)
            stop = rng.randrange(20)

            def body(i: int, groups: list[StaticGroup] = groups, stop: int = stop) -> int:
                started = [groups[i].allreduce(np.ones(5, np.float32), async_op=True) for _ in range(20)]
                if i == 0:
                    started[stop].wait()
                    groups[0].close()
                returned = 0
                for work in started:
                    with contextlib.suppress(FtcommError):
                        work.wait(DEADLINE)
                        returned += 1
                return returned

            first, *others = together(body, 3)
            assert first > stop
            assert first <= others[0] == others[1], f"seed {seed}: {first}, {others}"


@nothing_left
def test_close_delivers_the_messages_that_were_sent() -> None:
    with Ranks(2) as ranks:
        for attempt in range(20):
            groups = ranks.make(f"g{attempt}")
            for i in range(20):
                groups[0].send(np.full(5000, i, np.int64), 1, i)
            closing = Caller.start(groups[0].close)
            out = np.zeros(5000, np.int64)
            for i in reversed(range(20)):
                assert (groups[1].recv(out, 0, i) == i).all()
            closing.join()
            groups[1].close()


@pytest.mark.parametrize("reached", [False, True])
@pytest.mark.parametrize("transport", ["auto", "shm", "tcp"])
@nothing_left
def test_a_member_that_closes_the_group_at_once_ends_no_messages_of_others(
    transport: str, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others are still about to reach its memory, or have just done so."""
    reach, enter, look = Communicator.reach, Communicator.enter, static.StaticMembership.look
    closed, heard = threading.Event(), threading.Event()

    def reaches(mine: Communicator, epoch: int, member: int, *more: Any, **named: Any) -> Any:
        assert mine.me != 1 or member != 2 or reached or closed.wait(DEADLINE)
        return reach(mine, epoch, member, *more, **named)

    def looks(membership: static.StaticMembership, *more: Any) -> Any:
        actions = look(membership, *more)
        if actions and membership.me == 1:
            heard.set()
        return actions

    def enters(mine: Communicator, *more: Any) -> Any:
        assert mine.me != 1 or not reached or heard.wait(DEADLINE)
        return enter(mine, *more)

    monkeypatch.setattr(static.StaticMembership, "look", looks)
    monkeypatch.setattr(Communicator, "reach", reaches)
    monkeypatch.setattr(Communicator, "enter", enters)
    with Ranks(3) as ranks:

        def one(i: int) -> None:
            group = StaticGroup.from_handles(
                ranks.endpoints[i], "g", ranks.handles, timeout=DEADLINE, op_timeout=DEADLINE, transport=transport
            )
            ranks.groups.append(group)
            if i == 2:
                group.close()
                closed.set()
                return
            for size in (10, BIG):
                if i == 0:
                    group.send(np.arange(size), 1)
                else:
                    assert (group.recv(np.zeros(size, np.int64), 0) == np.arange(size)).all()
            with pytest.raises(LostError, match=r"Connection closed by peer: rank 2 .* has closed the group"):
                group.allreduce(np.zeros(1))

        together(one, 3)


def test_what_has_come_is_heard_before_a_doubt_ends() -> None:
    """Though the thread did not run for as long as a doubt may last."""
    near, far = socket.socketpair()
    said: list[int] = []
    looks: list[tuple[float, int]] = []
    stands, go = threading.Event(), threading.Event()

    def settle(looked: float) -> bool:
        looks.append((looked, len(said)))
        stands.set()
        assert go.wait(DEADLINE)
        return True

    nothing: Any = lambda *args: None  # noqa: E731
    hears = dict(on_said=lambda member, _: said.append(member), on_end=nothing, on_broken=nothing)
    pairs = Pairs("g", settle=settle, on_start=nothing, on_stop=nothing, **hears)
    with far:
        pairs.add({1: near})
        assert stands.wait(DEADLINE)
        far.sendall(FRAMES.frame(Left(7, 7)))
        sent = time.monotonic()
        go.set()
        until(lambda: looks[-1][0] > sent)
        pairs.end(Left(0, 0))
        pairs.join()
    assert all(heard for looked, heard in looks if looked > sent)


def test_a_death_is_told_in_the_thread_of_the_group_which_may_wait_for_others() -> None:
    heard: queue.SimpleQueue[tuple[int, str, str]] = queue.SimpleQueue()
    nothing: Any = lambda *args: None  # noqa: E731
    pairs = Pairs(
        "g",
        settle=lambda looked: False,
        on_start=nothing,
        on_stop=nothing,
        on_said=nothing,
        on_end=lambda member, why: heard.put((member, why, threading.current_thread().name)),
        on_broken=nothing,
    )
    pairs.died(3, "its process died")
    assert heard.get(timeout=DEADLINE) == (3, "its process died", "ftcomm-pairs-g")
    pairs.end(Left(0, 0))
    assert pairs.join()
    pairs.died(2, "its process died")  # as the thread that watches may be about to say


def test_a_connection_for_data_that_ends_between_two_that_live_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A firewall that has forgotten one connection of two: nobody is lost, and nobody waits for ever."""
    monkeypatch.setattr(static, "DOUBT", 0.05)
    with Ranks(2) as ranks:
        groups = ranks.make("g", transport="tcp")
        assert total(groups) == [3.0] * 2
        waiting = Caller.start(reduce_forever, groups[0])
        peer = groups[0]._exchange.member.peers[1]
        peer._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[attr-defined]
        with pytest.raises(LostError, match=r"connection for data.* \(between rank"):
            waiting.join()
        until(lambda: groups[1].error is not None)
        assert "was lost" not in str(groups[1].error)
        assert isinstance(groups[1].error, LostError)


def test_members_send_on_when_another_has_closed_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops of those that are left fail, and their connections for data end. They are asked why, and are not lost."""
    monkeypatch.setattr(static, "DOUBT", 0.05)
    with Ranks(3) as ranks:
        groups = ranks.make("g", transport="tcp")
        assert total(groups) == [7.0] * 3
        groups[0].close()
        for group in groups[1:]:
            until(lambda group=group: group.error is not None)  # type: ignore[misc]
            with pytest.raises(LostError, match="has closed the group"):
                group.allreduce(np.zeros(1))
        # It may be noticed or not.
        groups[2].internals._connection_ended(1, 1, "connection for data: closed by the other side")
        until(lambda: groups[1].internals._membership._answered >= {2})
        together(lambda i: groups[1].send(np.ones(5), 2) if i else groups[2].recv(np.zeros(5), 1), 2)


def test_a_mismatch_is_no_loss() -> None:
    with Ranks(2) as ranks:
        groups = ranks.make("g")

        def wrong(i: int) -> None:
            with pytest.raises(MismatchError):
                groups[i].allreduce(np.zeros(3 + i))

        together(wrong, 2)
        assert total(groups) == [3.0, 3.0]


@nothing_left
def test_close_ends_ops_in_flight() -> None:
    with Ranks(2) as ranks:
        groups = ranks.make("g")
        work = groups[0].allreduce(np.zeros(BIG), async_op=True)
        groups[0].close()
        with pytest.raises(FtcommError, match="was closed"):
            work.wait(DEADLINE)
        with pytest.raises(LostError, match="has closed the group"):
            groups[1].allreduce(np.zeros(BIG))


@pytest.mark.parametrize("garbage", [b"\xff" * 4, b"\0\0\0\x01\xc1", b"GET / HTTP/1.1\r\n"])
def test_a_member_that_says_what_cannot_be_is_lost(garbage: bytes) -> None:
    with Ranks(2) as ranks:
        groups = ranks.make("g")
        until(lambda: 0 in groups[1].internals._pairs._socks)  # the thread takes them over
        groups[1].internals._pairs._socks[0].send(garbage)
        with pytest.raises(LostError, match=r"rank 1 \(.*\) was lost: it has said what cannot be"):
            groups[0].allreduce(np.zeros(10))
        with pytest.raises(LostError):
            groups[1].allreduce(np.zeros(10))


@nothing_left
def test_callers_of_other_groups_take_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MAX_PARKED", 20)
    with Ranks(1) as ranks:
        place = endpoint.parse(ranks.handles[0])
        parked = ranks.endpoints[0].router

        def call(group: int) -> socket.socket:
            return place.dial("communicator", {"group": f"none {group}", "what": "link", "member": 0}, DEADLINE)

        callers = [call(group) for group in range(20)]
        until(lambda: len(parked._parked) == 20)
        callers += [call(group) for group in range(20, 30)]
        until(lambda: parked._parked[-1].group == "none 29")
        assert len(parked._parked) == 20  # the oldest made room
        for caller in callers[:25]:
            caller.close()
        callers = [*callers[25:], call(30)]
        until(lambda: len(parked._parked) == 6)  # those who have hung up, too
        for fields in (
            {"group": "", "what": "link", "member": 0},
            {"group": "x", "what": "link", "member": -1},
            {"group": "x", "what": "p2p", "member": 0},
            {"group": "x", "what": "p2p", "member": 0, "instance": "x"},
        ):
            with place.dial("communicator", fields, DEADLINE) as sock:
                sock.settimeout(DEADLINE)
                assert sock.recv(1) == b""
        with place.dial("no such purpose", {}, DEADLINE) as sock:
            sock.settimeout(DEADLINE)
            assert sock.recv(1) == b""
        for caller in callers:
            caller.close()


@nothing_left
def test_who_means_an_earlier_group_of_that_name_is_not_heard() -> None:
    with Ranks(2) as ranks:
        earlier = ranks.make("g")
        together(lambda i: earlier[i].close(), 2)
        groups = ranks.make("g")
        for what in ("data", "p2p"):
            fields = earlier[1].internals._communicator.fields(what, earlier[1].internals._nonces[0], static.EPOCH)
            with earlier[1].internals._dial(0, time.monotonic() + DEADLINE, fields) as sock:
                sock.settimeout(DEADLINE)
                assert sock.recv(1) == b""
        assert total(groups) == [3.0, 3.0]
        groups[1].send(np.ones(3), 0)
        assert groups[0].recv(np.zeros(3)).tolist() == [1.0] * 3


@nothing_left
def test_a_stranger_does_not_disturb_a_group_that_meets() -> None:
    with Ranks(2) as ranks:
        place = endpoint.parse(ranks.handles[0])
        silent = [place.dial("communicator", {"group": "g", "what": "link", "member": m}, DEADLINE) for m in (1, 1, 5)]
        silent[0].sendall(b"\xff\xff\xff\xff")
        assert total(ranks.make("g")) == [3.0, 3.0]
        for sock in silent:
            sock.close()


def test_threads_have_names_that_tell_whose_they_are() -> None:
    with Ranks(2) as ranks:
        ranks.make("mine")
        names = {thread.name for thread in threading.enumerate()}
        assert "ftcomm-pairs-mine" in names
        assert "ftcomm-endpoint" in names


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    near, far = Endpoint("::1"), Endpoint("::1")
    try:
        handles = [near.handle, far.handle]
        groups = together(
            lambda i: StaticGroup.from_handles((near, far)[i], "g", handles, transport="tcp", timeout=DEADLINE), 2
        )
        assert total(groups) == [3.0, 3.0]
        together(lambda i: groups[i].close(), 2)
    finally:
        near.close()
        far.close()
