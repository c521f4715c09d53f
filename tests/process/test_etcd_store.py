"""Views in a real etcd: who has the job, who may write, and what is there after everything that can happen between."""

from __future__ import annotations

import asyncio
import shutil
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from ftcomm.control import etcd
from ftcomm.control.etcd import Etcd, EtcdPlace
from ftcomm.control.etcd_store import EtcdStore
from ftcomm.control.finishes import NO_FINISHES, Finishes
from ftcomm.control.store import JobOver, StoreError
from ftcomm.control.views import Address, Addresses, Member, View
from tests.rigs.etcd import EtcdServer, etcd_server

pytestmark = pytest.mark.protocol

LEASE = 30.0  # s; long, so that on a busy machine none ends that is not to
SHORT = 5.0  # of those whose end is waited for
SECRET = "hush"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    with etcd_server(tmp_path_factory.mktemp("etcd")) as running:
        yield running


@pytest.fixture
def url(server: EtcdServer, request: pytest.FixtureRequest) -> str:
    return server.url(f"{request.node.name}")


def view(epoch: int) -> View:
    return View(epoch, None, (Member(0, "a", Addresses.of((Address("h", 1, "b", 2, 3, "0" * 32),)), True),), "why")


class Store(EtcdStore):
    """One that keeps what it says."""

    def __init__(
        self, url: str, port: int = 1, standby: bool = False, env: dict[str, str] | None = None, lease: float = LEASE
    ) -> None:
        super().__init__(EtcdPlace.parse(url, env or {}), port, lease, standby)
        self.said: list[str] = []
        self.tell = self.said.append

    async def until(self, text: str) -> None:
        while not any(text in each for each in self.said):
            await asyncio.sleep(0.01)

    def fall_silent(self) -> None:
        """As a stopped process does."""
        assert self._keep_task is not None
        self._keep_task.cancel()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 100)

    asyncio.run(bounded())


def keys(url: str) -> dict[str, Any]:
    place = EtcdPlace.parse(url, {})
    return Etcd(place, 5).txn([], [{"request_range": etcd._below(place.prefix)}], []).found()


def stored(url: str) -> list[int]:
    """Epochs."""
    return sorted(
        int(entry.value.split(b'"epoch":')[1].split(b",")[0]) for key, entry in keys(url).items() if "/view/" in key
    )


def test_a_lease_that_was_taken_away_is_noticed_by_who_writes(url: str) -> None:
    """Nobody else had the job, so it is had again."""

    async def test() -> None:
        store = Store(url)
        await store.acquire()
        store.fall_silent()
        await store._ask(store._etcd.revoke, store._lease)
        writing = store.append(view(1))
        await store.doubt()
        assert stored(url) == []
        writing.cancel()
        await store.acquire()
        await store.append(view(1))
        assert stored(url) == [1]
        await store.release()

    run(test)


def test_who_was_not_sure_for_a_moment_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that keeps the lease comes late, but in its time. What was to be said meanwhile was not said."""
    time = 100.0
    monkeypatch.setattr("ftcomm.control.etcd_store.now", lambda: time)

    async def test() -> None:
        nonlocal time
        store = Store("etcd://127.0.0.1:1/job")
        asked, may_answer = threading.Event(), threading.Event()

        def late(lease: int) -> int:
            asked.set()
            may_answer.wait(30)
            return 60

        store._beats.keep_alive = late  # type: ignore[method-assign]
        store._until = time + 1
        keeper = asyncio.ensure_future(store._keep())
        while not asked.is_set():
            await asyncio.sleep(0.01)
        assert store.sure
        time += 2
        assert not store.sure
        may_answer.set()
        await store.doubt()
        await keeper
        assert not store.sure
        await store.release()

    run(test)


def test_the_end_of_a_job_leaves_those_whose_names_begin_alike(url: str) -> None:
    async def test() -> None:
        first, other = Store(url), Store(f"{url}/other")
        for store in (first, other):
            await store.acquire()
            await store.append(view(1))
            await store.append(view(2))
        await first.clear()
        assert len(keys(f"{url}/other")) == len(keys(url)) == 5
        await other.append(view(3))
        assert other.sure
        await first.release()
        await other.release()

    run(test)


def losing_the_answer(store: Store, *which: int) -> None:
    """Of these transactions, counted from 1: they are carried out."""
    txn, calls = store._etcd.txn, iter(range(1, 1000))

    def lossy(*args: Any) -> Any:
        answer = txn(*args)
        if next(calls) in which:
            raise etcd.EtcdAway("the answer is lost")
        return answer

    store._etcd.txn = lossy  # type: ignore[method-assign]


def test_the_last_two_views_come_back_and_nothing_grows(url: str) -> None:
    async def test() -> None:
        store = Store(url)
        await store.acquire()
        assert store.views == []
        for epoch in range(1, 8):
            await store.append(view(epoch))
        assert len(keys(url)) == 5
        await store.release()
        assert len(keys(url)) == 4  # not the owner
        again = Store(url)
        await again.acquire()
        assert again.views == store.views == [view(6), view(7)]
        await again.clear()
        await again.release()
        assert not keys(url)

    run(test)


def large(epoch: int, lives: dict[int, str], ranks: int) -> View:
    """With addresses of such lengths, eight to a host."""
    return View(epoch, None, tuple(Member(r, life, table(r, ranks), True) for r, life in lives.items()), "why")


def table(replica: int, ranks: int) -> Addresses:
    layout, tuning, traits = "l" * 60, "t" * 60, "a" * 60
    return Addresses.of(
        Address(
            f"h-{replica}-{i // 8}", 50123, f"{i // 8:036}", i, 3, f"{replica:016x}{i:016x}", layout, "", tuning, traits
        )
        for i in range(ranks)
    )


def tables(url: str) -> set[str]:
    return {key.rpartition("/")[0] for key in keys(url) if "/ranks/" in key}


def test_views_of_98304_ranks_in_values_below_a_megabyte(url: str) -> None:
    """Each table of addresses is there as long as a view needs it; a loss writes none, and a return one."""
    told = [
        large(1, {r: f"life {r}" for r in range(12)}, 8192),
        large(2, {r: f"life {r}" for r in range(1, 12)}, 8192),
        large(3, {r: f"life {r}" for r in range(1, 12)}, 8192),
    ]
    back = View(4, 7, (Member(0, "again", table(99, 8192), False), *told[2].members), "back", 1 << 32)

    async def test() -> None:
        store = Store(url)
        await store.acquire()
        counts: list[tuple[int, int]] = []
        written: list[list[etcd.Json]] = []
        put = store._write

        async def count(compare: list[etcd.Json], what: list[etcd.Json]) -> etcd.Txn:
            written.append(what)
            return await put(compare, what)

        store._write = count  # type: ignore[method-assign]
        for one in (*told, back):
            written.clear()
            await store.append(one)
            counts.append((len(written), len(tables(url))))
        assert counts == [(13, 12), (1, 12), (1, 11), (2, 12)], "requests of each view, and tables after it"
        there = keys(url)
        assert max(len(entry.value) for entry in there.values()) < 1 << 20
        assert sum(len(entry.value) for key, entry in there.items() if "/view/" in key) < 10_000
        await store.release()
        other = Store(url, 2)
        await other.acquire()
        assert other.views == [told[2], back]
        await other.clear()
        await other.release()
        assert keys(url) == {}

    run(test)


def test_a_smaller_request_makes_more_shards(tmp_path: Path) -> None:
    most = 20_000

    async def test() -> None:
        with etcd_server(tmp_path, "--max-request-bytes", str(most)) as server:
            store = Store(server.url("job"), env={etcd.LARGEST: str(most)})
            await store.acquire()
            await store.append(one := large(1, {0: "a", 1: "b"}, 1000))
            assert len([key for key in keys(server.url("job")) if "/ranks/" in key]) > 6
            await store.release()
            other = Store(server.url("job"))
            await other.acquire()
            assert other.views == [one], "whatever the shards of this one are"
            await other.release()

    run(test)


@pytest.mark.parametrize("how", ["missing", "changed", "empty"])
def test_a_take_over_without_all_addresses_is_refused(url: str, how: str) -> None:
    async def test() -> None:
        store = Store(url)
        await store.acquire()
        await store.append(view(1))
        await store.release()
        (shard,) = (key for key in keys(url) if "/ranks/" in key)
        another = msgspec.msgpack.encode(table(5, 1))
        other = {"missing": etcd.delete(shard), "changed": etcd.put(shard, another), "empty": etcd.put(shard, b"")}
        Etcd(EtcdPlace.parse(url, {}), 5).txn([], [other[how]], [])
        with pytest.raises(StoreError, match=r"replica 0 in the view of epoch 1 are not .*restore what etcd had, or"):
            await Store(url, 2).acquire()

    run(test)


def test_who_died_while_it_wrote_addresses_leaves_nothing_behind(url: str) -> None:
    """The next one removes what no view needs with its own first view, and writes anew what one does."""

    async def test() -> None:
        store = Store(url)
        await store.acquire()
        await store.append(view(1))
        lost, put = large(2, {0: "a", 1: "b"}, 8), store._write

        async def dies(compare: list[etcd.Json], what: list[etcd.Json]) -> etcd.Txn:
            answer = await put(compare, what)
            if len(tables(url)) == 3:
                await asyncio.Event().wait()
            return answer

        store._write = dies  # type: ignore[method-assign]
        writing = store.append(lost)
        while len(tables(url)) < 3:
            await asyncio.sleep(0.01)
        writing.cancel()
        await store.release()
        other = Store(url, 2)
        await other.acquire()
        assert other.views == [view(1)]
        await other.append(large(2, {1: "b"}, 8))
        assert len(tables(url)) == 2, "that of the view before, and the new one"
        await other.release()
        last = Store(url, 3)
        await last.acquire()
        assert last.views == [view(1), large(2, {1: "b"}, 8)]
        await last.release()

    run(test)


def test_addresses_that_are_needed_again_get_another_place(url: str) -> None:
    """Where nothing that is late, as the removal of the first ones may be, can reach them."""
    told = [large(epoch, lives, 8) for epoch, lives in enumerate(({0: "a", 1: "b"}, {1: "b"}, {1: "b"}), 1)]
    last = large(4, {0: "a", 1: "b"}, 8)

    async def test() -> None:
        store = Store(url)
        await store.acquire()
        for one in (*told, last):
            await store.append(one)
        assert sorted(folder.rpartition("/")[2] for folder in tables(url)) == ["1", "4"], "epochs"
        await store.release()
        other = Store(url, 2)
        await other.acquire()
        assert other.views == [told[2], last]
        await other.release()

    run(test)


def test_who_is_not_the_owner_any_more_writes_no_addresses(url: str) -> None:
    async def test() -> None:
        store = Store(url)
        await store.acquire()
        store.fall_silent()
        await store._ask(store._etcd.revoke, store._lease)
        other = Store(url, 2)
        await other.acquire()
        writing = store.append(large(1, {0: "a"}, 8))
        await store.doubt()
        assert tables(url) == set()
        writing.cancel()
        await store.release()
        await other.release()

    run(test)


def test_a_second_one_is_refused_with_the_name_of_the_first(url: str) -> None:
    async def test() -> None:
        first, second = Store(url, 4711, lease=2.0), Store(url)
        grant = first._etcd.grant
        first._etcd.grant = lambda seconds: grant(60)  # type: ignore[method-assign]  # it lives, however busy the machine
        await first.acquire()
        with pytest.raises(StoreError, match=r"port 4711 .* has the job .*two of one job must not run.*--standby"):
            await second.acquire()
        assert first.sure
        await first.append(view(1))
        await first.release()
        await second.release()

    run(test)


def test_one_that_was_killed_is_waited_for_as_long_as_its_lease_lasts(url: str) -> None:
    async def test() -> None:
        first, second = Store(url, lease=SHORT), Store(url)
        await first.acquire()
        await first.append(view(1))
        first.fall_silent()
        await second.acquire()
        assert second.views == [view(1)]
        await second.release()

    run(test)


def test_a_standby_takes_over_and_who_comes_back_is_fenced(url: str) -> None:
    async def test() -> None:
        first, second = Store(url, lease=SHORT), Store(url, 4712, standby=True)
        await first.acquire()
        await first.append(view(1))
        taking = asyncio.ensure_future(second.acquire())
        await second.until("takes over when it is gone")
        first.fall_silent()
        await taking
        assert not first.sure
        late = first.append(view(2))  # even if it is not asked whether it is sure
        await asyncio.wait_for(first.doubt(), 60)
        assert not late.done()
        assert stored(url) == [1]
        await second.append(view(2))
        with pytest.raises(StoreError, match=r"port 4712 .* has taken the job .* over; this one decides nothing"):
            await first.acquire()
        assert second.sure
        assert stored(url) == [1, 2]
        late.cancel()
        await first.release()
        assert second.sure
        await second.append(view(3))
        await second.release()

    run(test)


def test_a_write_of_an_earlier_term_changes_nothing(url: str) -> None:
    """Of one's own: given up while it was under way, and carried out when the next term has begun."""

    async def test() -> None:
        store = Store(url)
        await store.acquire()
        late, writes = store._etcd.txn, []

        def never(*args: Any) -> Any:
            writes.append(args)
            raise etcd.EtcdAway("still under way")

        store._etcd.txn = never  # type: ignore[method-assign]
        given_up = store.append(view(1))
        while not writes:
            await asyncio.sleep(0.01)
        given_up.cancel()
        store._etcd.txn = late  # type: ignore[method-assign]
        await store.acquire()
        answer = await store._ask(late, *writes[0])
        assert not answer.succeeded
        assert stored(url) == []
        await store.append(view(1))
        await store.release()

    run(test)


def test_a_standby_that_takes_over_knows_who_has_finished(url: str) -> None:
    """What was stored by a version that wrote none of that has none. A late write of the first changes nothing."""
    some, more = Finishes(1, ((0, "a"),), (0,)), Finishes(1, ((0, "a"), (1, "b")), (0, 1))

    async def test() -> None:
        first, second = Store(url, lease=SHORT), Store(url, 4712, standby=True)
        await first.acquire()
        assert first.finishes == NO_FINISHES
        await first.append(view(1))
        txn, attempts = first._etcd.txn, list[Any]()

        def lossy(*args: Any) -> Any:
            attempts.append(args)
            answer = txn(*args)
            if len(attempts) == 1:
                raise etcd.EtcdAway("the answer is lost")
            return answer

        first._etcd.txn = lossy  # type: ignore[method-assign]
        await first.write_finishes(more)  # in a second attempt
        await first.write_finishes(some)
        assert not (await first._ask(txn, *attempts[1])).succeeded, "nor does one that comes late take anything back"
        taking = asyncio.ensure_future(second.acquire())
        await second.until("takes over when it is gone")
        first.fall_silent()
        await taking
        assert second.finishes == some
        late = first.write_finishes(more)
        await asyncio.wait_for(first.doubt(), 60)
        assert not late.done()
        late.cancel()
        await second.write_finishes(more)
        await second.append(view(2))
        assert max(len(entry.value) for entry in keys(url).values()) < 1000
        await second.clear()
        assert set(keys(url)) <= {second._owner}
        for store in (first, second):
            await store.release()

    run(test)


def test_who_has_finished_in_an_earlier_job_of_that_name_has_not_in_this_one(url: str) -> None:
    """A version that knew of no finishes has cleared that job, and left them there."""
    left = Finishes(1, ((0, "a"),), (0, 1))

    async def test() -> None:
        store = Store(url)
        await store.acquire()
        await store.append(view(1))
        await store.write_finishes(left)
        await store._ask(store._etcd.txn, [], [*map(etcd.delete, (store._term, *store._view_keys))], [])
        await store.release()
        assert f"{EtcdPlace.parse(url, {}).prefix}/finished" in keys(url)
        for views in ([], [view(1)]):
            store = Store(url)
            await store.acquire()
            assert (store.views, store.finishes) == (views, NO_FINISHES)
            if not views:
                await store.append(view(1))
                await store.release()
        await store.write_finishes(left)
        await store.release()
        store = Store(url)
        await store.acquire()
        assert store.finishes == left
        await store.clear()
        await store.release()

    run(test)


@pytest.mark.parametrize("lost", [1, 2, 3, 4])
def test_an_answer_that_is_lost_while_it_becomes_the_owner(url: str, lost: int) -> None:
    async def test() -> None:
        before = Store(url)
        await before.acquire()
        await before.append(view(1))
        await before.release()
        store = Store(url)
        losing_the_answer(store, lost)
        await store.acquire()
        assert store.views == [view(1)]
        await store.append(view(2))
        store._doubt.set()
        await store.acquire()
        assert store.views == [view(1), view(2)]
        await store.release()

    run(test)


def test_an_answer_that_is_lost_while_it_writes(url: str) -> None:
    async def test() -> None:
        store = Store(url)
        await store.acquire()
        losing_the_answer(store, 1, 3)
        await store.append(view(1))
        await store.append(view(2))
        await store.append(view(3))
        assert stored(url) == [2, 3]
        assert store.said == [store.said[0], "etcd can be used again", *store.said[2:]]
        await store.release()

    run(test)


def test_etcd_goes_for_longer_than_the_lease_and_comes_back(tmp_path: Path) -> None:
    async def test(server: EtcdServer) -> None:
        store = Store(server.url("job"), lease=SHORT)
        await store.acquire()
        await store.append(view(1))
        server.kill()
        writing = store.append(view(2))
        await store.doubt()
        assert not store.sure
        assert "training goes on" in store.said[0]
        assert f"127.0.0.1:{server.port}" in store.said[0]
        assert not writing.done()
        writing.cancel()
        having = asyncio.ensure_future(store.acquire())
        await asyncio.sleep(0)
        server.start()
        await having
        assert set(store.said[1::2]) == {"etcd can be used again"}  # a slow one may be gone, and come back, once more
        assert all("training goes on" in text for text in store.said[::2])
        assert store.views[-1] in (view(1), view(2))
        await store.append(view(3))
        await store.release()

    with etcd_server(tmp_path) as server:
        run(lambda: test(server))


@pytest.mark.parametrize("standby", [False, True])
def test_an_etcd_that_has_lost_its_data_is_no_proof_that_the_job_has_ended(tmp_path: Path, standby: bool) -> None:
    async def test(server: EtcdServer) -> None:
        owner = Store(server.url("job"), lease=SHORT)
        await owner.acquire()
        await owner.append(view(1))
        second = Store(server.url("job"), standby=True)
        waiting = asyncio.ensure_future(second.acquire())
        await second.until("takes over")
        server.kill()
        shutil.rmtree(tmp_path / "etcd")
        await owner.doubt()
        server.start()
        with pytest.raises(StoreError, match="etcd has lost the job") as found:
            await (waiting if standby else owner.acquire())
        assert not isinstance(found.value, JobOver)
        waiting.cancel()
        for store in (owner, second):
            await store.release()

    with etcd_server(tmp_path) as server:
        run(lambda: test(server))


def test_etcd_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    """The loop does not stand still meanwhile, and the lease is not lost."""

    async def test(server: EtcdServer) -> None:
        store = Store(server.url("job"))
        await store.acquire()
        server.signal(signal.SIGSTOP)
        writing = store.append(view(1))
        for _ in range(10):
            await asyncio.sleep(0.02)
        assert not writing.done()
        server.signal(signal.SIGCONT)
        await writing
        assert store.views == [view(1)]
        await store.release()

    with etcd_server(tmp_path) as server:
        run(lambda: test(server))


def test_no_etcd_at_the_start_is_said_in_seconds(server: EtcdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftcomm.control.etcd_store.ANSWER_TIMEOUT", 0.5)

    async def test() -> None:
        with pytest.raises(
            StoreError, match=r"etcd cannot be used \(127\.0\.0\.1:1: Connection refused\)\. Look whether"
        ):
            await Store("etcd://127.0.0.1:1/job").acquire()

    run(test)


def test_a_standby_ends_with_the_job(url: str) -> None:
    async def test() -> None:
        first, second = Store(url), Store(url, standby=True)
        await first.acquire()
        waiting = asyncio.ensure_future(second.acquire())
        await second.until("takes over")
        await first.clear()
        await first.release()
        with pytest.raises(JobOver, match="has ended the job"):
            await waiting
        await second.release()

    run(test)


@pytest.mark.parametrize("key", ["owner", "view/0"])
def test_keys_of_something_else_are_refused(url: str, key: str) -> None:
    place = EtcdPlace.parse(url, {})
    Etcd(place, 5).txn([], [etcd.put(f"{place.prefix}/{key}", b"hello")], [])

    async def test() -> None:
        with pytest.raises(StoreError, match="choose another name in --store"):
            await Store(url).acquire()

    run(test)


def test_views_that_somebody_else_writes_are_noticed(url: str) -> None:
    async def test() -> None:
        store = Store(url)
        await store.acquire()
        await store.append(view(1))
        store._etcd.txn([], [etcd.put(f"{store._prefix}/view/0", b"hello")], [])
        with pytest.raises(StoreError, match="was changed by somebody else"):
            await store.append(view(2))
        await store.release()

    run(test)


def test_an_account_is_asked_for_and_a_token_that_ended_is_renewed(tmp_path: Path) -> None:
    async def test(server: EtcdServer) -> None:
        url, env = server.url("job"), {"FTCOMM_ETCD_USER": "root", "FTCOMM_ETCD_PASSWORD": SECRET}
        admin = Etcd(EtcdPlace.parse(url, {}), 5)
        admin._ask(etcd.Kept, "/auth/user/add", {"name": "root", "password": SECRET})
        admin._ask(etcd.Kept, "/auth/role/add", {"name": "root"})
        admin._ask(etcd.Kept, "/auth/user/grant", {"user": "root", "role": "root"})
        admin._ask(etcd.Kept, "/auth/enable", {})
        with pytest.raises(StoreError, match="user name is empty"):
            await Store(url).acquire()
        with pytest.raises(StoreError, match="authentication failed") as error:
            await Store(url, env={**env, "FTCOMM_ETCD_PASSWORD": f"{SECRET}2"}).acquire()
        assert SECRET not in str(error.value)
        store = Store(url, env=env)
        await store.acquire()
        await store.append(view(1))
        for each in (store._etcd, store._beats):
            each._token = "ended.7"
        await store.append(view(2))
        await store.release()
        assert SECRET not in "".join(store.said)

    with etcd_server(tmp_path) as server:
        run(lambda: test(server))


def test_tls(tmp_path: Path) -> None:
    """Both sides show a certificate."""
    authority, other = trustme.CA(), trustme.CA()
    mine, its = authority.issue_cert("coordinator"), authority.issue_cert("127.0.0.1")
    files = {name: str(tmp_path / name) for name in ("ca", "other", "cert", "key", "its-cert", "its-key")}
    authority.cert_pem.write_to_path(files["ca"])
    other.cert_pem.write_to_path(files["other"])
    for made, name in ((mine, ""), (its, "its-")):
        made.cert_chain_pems[0].write_to_path(files[f"{name}cert"])
        made.private_key_pem.write_to_path(files[f"{name}key"])
    env = {f"FTCOMM_ETCD_{name.upper()}": files[name] for name in ("cert", "key")}

    async def test(server: EtcdServer) -> None:
        url = server.url("job")
        store = Store(url, env={**env, "FTCOMM_ETCD_CACERT": files["ca"]})
        await store.acquire()
        await store.append(view(1))
        await store.release()
        with pytest.raises(etcd.EtcdAway, match="its certificate is not accepted"):
            Etcd(EtcdPlace.parse(url, {**env, "FTCOMM_ETCD_CACERT": files["other"]}), 5).grant(5)
        with pytest.raises(etcd.EtcdAway, match="if it speaks TLS, set FTCOMM_ETCD_CACERT"):
            Etcd(EtcdPlace.parse(url, {}), 5).grant(5)
        with pytest.raises(etcd.EtcdAway, match="certificate"):
            Etcd(EtcdPlace.parse(url, {"FTCOMM_ETCD_CACERT": files["ca"]}), 5).grant(5)

    options = ["--cert-file", files["its-cert"], "--key-file", files["its-key"]]
    options += ["--trusted-ca-file", files["ca"], "--client-cert-auth"]
    with etcd_server(tmp_path, *options, scheme="https") as server:
        run(lambda: test(server))
