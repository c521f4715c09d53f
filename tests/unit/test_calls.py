"""Every collective by its call, among threads of one process: sizes, dtypes, in place or not, and bad arguments."""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ftcomm.collective.operation import stamp_of
from ftcomm.engines.host_calls import HostCalls
from ftcomm.errors import ArgumentError, LostError, MismatchError
from ftcomm.groups.calls import Calls
from ftcomm.kernels.call_codes import ELSEWHERE, UNKNOWN
from ftcomm.transport.segment import CHUNK, slot_payload
from tests.rigs.exchange import DEADLINE, Member, Rig

pytestmark = pytest.mark.protocol

COUNTS = (0, 1, 1000, 300_001)  # of float32: nothing, a part, parts of a slot, several batches


class Caller(Calls):
    stamp, lag = UNKNOWN, 0

    def __init__(self, member: Member, roster: tuple[int, ...]) -> None:
        super().__init__("", member.replica, None, HostCalls(len(roster)), member.exchange)
        self.roster = roster

    def _when(self) -> tuple[int, int]:
        return self.stamp, self.lag


class Group:
    """All members, and a way to let each of them make a call in a thread of its own."""

    def __init__(self, rig: Rig, roster: tuple[int, ...]) -> None:
        self.rig, self.callers = rig, [Caller(rig.members[m], roster) for m in roster]

    def all(self, call: Callable[[Caller], Any], only: tuple[int, ...] | None = None) -> list[Any]:
        """What each of them (of `only`) returned or raised."""
        out: dict[int, Any] = {}

        def run(caller: Caller) -> None:
            try:
                out[caller._me] = call(caller)
            except Exception as error:
                out[caller._me] = error

        callers = [caller for caller in self.callers if only is None or caller._me in only]
        threads = [threading.Thread(target=run, args=(caller,)) for caller in callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        return [out[caller._me] for caller in callers]


@pytest.fixture(params=["shm", "tcp"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """Three members whose numbers are not their ranks; their results are compared."""
    with Rig((1, 4, 6), request.param, verify=True) as rig:
        rig.view((1, 4, 6))
        yield Group(rig, (1, 4, 6))
        assert all(not member.divergences for member in rig.members.values())


def values(rank: int, count: int) -> np.ndarray:
    return np.random.default_rng((rank, count)).standard_normal(count).astype(np.float32)


@pytest.mark.parametrize("count", COUNTS)
def test_every_collective_gives_what_numpy_gives(group: Group, count: int) -> None:
    xs = [values(rank, 3 * count) for rank in range(3)]
    small = [x[:count].copy() for x in xs]
    total = xs[0] + xs[1] + xs[2]
    own = [slice(rank * count, (rank + 1) * count) for rank in range(3)]

    def same(got: list[Any], want: list[Any]) -> None:
        for rank, (a, b) in enumerate(zip(got, want, strict=True)):
            if isinstance(a, Exception):
                raise a
            assert (a is None and b is None) or a.tobytes() == b.tobytes(), f"rank {rank}"

    same(group.all(lambda c: c.broadcast(small[c.rank].copy(), 2)), [small[2]] * 3)
    reduced = group.all(lambda c: c.reduce(small[c.rank].copy(), 1))
    same(reduced, [small[0], total[:count], small[2]])

    def out(size: int) -> np.ndarray:
        return np.full(size, np.nan, np.float32)

    same(group.all(lambda c: c.allgather(out(3 * count), small[c.rank])), [np.concatenate(small)] * 3)
    same(
        group.all(lambda c: c.gather(out(3 * count) if c.rank == 2 else None, small[c.rank], 2)),
        [None, None, np.concatenate(small)],
    )
    scattered = group.all(lambda c: c.scatter(out(count), xs[0].copy() if c.rank == 0 else None, 0))
    same(scattered, [xs[0][part] for part in own])
    same(group.all(lambda c: c.reduce_scatter(out(count), xs[c.rank].copy())), [total[part] for part in own])
    crossed = [np.concatenate([x[part] for x in xs]) for part in own]
    same(group.all(lambda c: c.alltoall(out(3 * count), xs[c.rank].copy())), crossed)
    assert group.all(lambda c: c.barrier()) == [None] * 3

    def gather_in_place(caller: Caller) -> np.ndarray:
        whole = out(3 * count)
        whole[own[caller.rank]] = small[caller.rank]
        return caller.allgather(whole, whole[own[caller.rank]])

    def scatter_in_place(caller: Caller) -> np.ndarray:
        x = xs[caller.rank].copy()
        part = caller.reduce_scatter(x[own[caller.rank]], x).copy()
        x[own[caller.rank]] = xs[caller.rank][own[caller.rank]]
        assert x.tobytes() == xs[caller.rank].tobytes()  # all else stays as it was
        return part

    same(group.all(gather_in_place), [np.concatenate(small)] * 3)
    same(group.all(scatter_in_place), [total[part] for part in own])


def test_overlapping_arrays_that_are_not_in_place(group: Group) -> None:
    def call(caller: Caller) -> np.ndarray:
        x = np.arange(900) + 1000 * caller.rank
        return caller.alltoall(x, x).copy()  # each part would overwrite one that is yet to be sent

    for rank, got in enumerate(group.all(call)):
        parts = [np.arange(300) + 300 * rank + 1000 * other for other in range(3)]
        assert (got == np.concatenate(parts)).all()


def test_uneven_parts(group: Group) -> None:
    counts = [[0, 5, 100_000], [3, 0, 0], [70_000, 1, 2]]
    given = [np.arange(sum(row)) + 1_000_000 * rank for rank, row in enumerate(counts)]

    def call(caller: Caller) -> np.ndarray:
        column = [row[caller.rank] for row in counts]
        return caller.alltoall(np.empty(sum(column), np.int64), given[caller.rank], column, counts[caller.rank])

    for rank, got in enumerate(group.all(call)):
        want = [given[i][sum(counts[i][:rank]) :][: counts[i][rank]] for i in range(3)]
        assert (got == np.concatenate(want)).all()


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(30).to(torch.float8_e4m3fn),
        torch.arange(30).to(torch.float8_e8m0fnu),
        torch.arange(30, dtype=torch.float32).to(torch.complex64).conj(),
        torch.arange(30).to(torch.bfloat16).view(5, 6).t(),
        torch.arange(30) % 2 == 0,
        torch.arange(60)[::2],
        np.arange(30).astype("datetime64[s]"),
        np.arange(30).astype(">i4"),
        np.arange(30).astype(ml_dtypes.float8_e4m3b11fnuz),
        np.array([(i, i / 2) for i in range(30)], [("a", np.int8), ("b", np.float64)]),
        np.arange(30, dtype=np.complex128).reshape(5, 6).T,
    ],
    ids=lambda x: f"{type(x).__module__}-{x.dtype}",
)
def test_what_moves_may_have_any_dtype_and_strides(group: Group, x: Any) -> None:
    def raw(y: Any) -> bytes:
        flat = y.resolve_conj().contiguous().view(torch.uint8).numpy() if isinstance(y, torch.Tensor) else y
        return bytes(flat.tobytes())

    def empty(*shape: int) -> Any:
        return torch.zeros(shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else np.zeros(shape, x.dtype)

    for out in group.all(lambda c: c.broadcast(x if c.rank == 1 else empty(*x.shape), 1)):
        assert type(out) is type(x)
        assert out.shape == x.shape
        assert raw(out) == raw(x)
    for out in group.all(lambda c: c.allgather(empty(90), x)):
        assert raw(out[30:60]) == raw(x.reshape(-1))


def test_read_only_input(group: Group) -> None:
    x = np.frombuffer(bytes(range(12)), np.uint8)
    assert all((out == [*range(12)] * 3).all() for out in group.all(lambda c: c.allgather(np.empty(36, np.uint8), x)))
    sums = group.all(lambda c: c.reduce_scatter(np.empty(4, np.uint8), x))
    assert [out.tolist() for out in sums] == [[0, 3, 6, 9], [12, 15, 18, 21], [24, 27, 30, 33]]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_accumulated_in_fp32(group: Group, dtype: str) -> None:
    """0.5 is lost in a sum with 64 that is rounded at once, and not in one that is rounded at the end."""
    given = [64.0, 3.5, 3.5]
    kind = getattr(torch, dtype)
    want = (torch.tensor(given).to(kind).float().sum()).to(kind)
    for outs in (
        group.all(lambda c: c.allreduce(torch.full((5,), given[c.rank]).to(kind))),
        group.all(lambda c: c.reduce_scatter(torch.zeros(5, dtype=kind), torch.full((15,), given[c.rank]).to(kind))),
    ):
        assert all((out.float() == want.float()).all() for out in outs)
    assert want.float() != (torch.tensor(67.5).to(kind).float() + 3.5).to(kind).float() or dtype == "float8_e5m2"


@pytest.mark.parametrize(("op", "want"), [("band", 0b1000), ("bor", 0b1111), ("bxor", 0b1001)])
def test_bits(group: Group, op: str, want: int) -> None:
    given = [0b1010, 0b1100, 0b1111]
    assert all((out == want).all() for out in group.all(lambda c: c.allreduce(np.full(9, given[c.rank]), op)))
    flags = group.all(lambda c: c.allreduce(np.array([c.rank == 1, True, False]), op))
    expected = {"band": [False, True, False], "bor": [True, True, False], "bxor": [True, True, False]}[op]
    assert all(out.tolist() == expected for out in flags)


def test_asynchronous_ops_overlap_and_tell_who_contributed(group: Group) -> None:
    def call(caller: Caller) -> list[Any]:
        out = np.empty(300, np.float32)
        works = [
            caller.allgather(out, np.full(100, caller.rank, np.float32), async_op=True),
            caller.reduce_scatter(np.empty(10, np.int64), np.arange(30), "avg", async_op=True),
            caller.barrier(async_op=True),
        ]
        assert works[2].wait(DEADLINE) is None
        return [works[0].wait(), works[1].wait(), works[0].contributors, works[1].contributors]

    for rank, (gathered, average, who, all_of_it) in enumerate(group.all(call)):
        assert (gathered == np.repeat([0, 1, 2], 100)).all()
        assert (average == np.arange(10) + 10 * rank).all()
        assert [tuple(span) for span in who] == [(0, 100, (1,)), (100, 200, (4,)), (200, 300, (6,))]
        assert [tuple(span) for span in all_of_it] == [(0, 10, (1, 4, 6))]


def test_calls_that_differ_fail_alike_and_the_group_goes_on(group: Group) -> None:
    for wrong in (
        lambda c: c.broadcast(np.zeros(10), c.rank % 2),
        lambda c: c.allgather(np.zeros(30), np.zeros(10)) if c.rank else c.broadcast(np.zeros(10), 1),
        lambda c: c.allgather(np.zeros(30 + 3 * c.rank), np.zeros(10 + c.rank)),
        lambda c: c.allreduce(np.zeros(0)) if c.rank == 2 else c.barrier(),
        lambda c: c.reduce(np.zeros(10), 0, "min" if c.rank else "max"),
    ):
        errors = group.all(wrong)
        assert len({str(error) for error in errors}) == 1
        assert all(isinstance(error, MismatchError) for error in errors)
        assert "the members of the group made different calls" in str(errors[0])
    assert group.all(lambda c: c.broadcast(np.full(3, c.rank), 1).tolist()) == [[1, 1, 1]] * 3


@pytest.mark.parametrize("count", [3, 300_001])
def test_calls_of_different_steps_are_an_error_that_names_them(group: Group, count: int) -> None:
    def at(*stamps: int) -> list[Any]:
        for caller, stamp in zip(group.callers, stamps, strict=True):
            caller.stamp, caller.lag = stamp, 2  # two boundaries were of repeated steps
        return group.all(lambda c: float(c.allreduce(np.ones(count), "avg")[0]))

    for call in (stamp_of(7), ELSEWHERE, UNKNOWN):
        assert at(call, call, call) == [1.0] * 3
        assert at(call, UNKNOWN, call) == [1.0] * 3  # before the first boundary, say: no reason to doubt
    errors = at(stamp_of(8), stamp_of(7), stamp_of(8))
    assert {str(error) for error in errors} == {
        f"op 6, allreduce(op='avg') of {count} x float64, was called at different steps: replicas 1, 6 at step 6, "
        "replica 4 at step 5. One of them has skipped a call or made one more; look for a branch that not all ranks "
        "take."
    }
    assert all(isinstance(error, MismatchError) for error in errors)
    errors = at(stamp_of(8), ELSEWHERE, UNKNOWN)
    assert all(isinstance(error, MismatchError) for error in errors)
    assert "replica 1 at step 6, replica 4 in another thread than that of the step loop, replica 6. " in str(errors[0])
    assert at(stamp_of(9), stamp_of(9), stamp_of(9)) == [1.0] * 3  # the group goes on


@pytest.mark.parametrize("how", ["blocks", "async"])
def test_two_threads_that_call_at_once_are_told_so(group: Group, how: str) -> None:
    """Whose call is matched with whose on the other members nobody can say."""
    first, *others = group.callers
    errors: list[str] = []

    def call() -> None:
        with pytest.raises(ArgumentError) as raised:
            first.allreduce(np.ones(3))
        errors.append(str(raised.value))

    thread = threading.Thread(target=call, name="reader")
    thread.start()
    while 0 not in first._turn._held:  # it waits for the others
        time.sleep(0.001)
    with pytest.raises(ArgumentError, match="thread 'MainThread' called a collective of a group in which another"):
        first.barrier(async_op=how == "async")
    assert group.all(lambda c: float(c.allreduce(np.ones(3))[0]), only=tuple(c._me for c in others)) == [3.0] * 2
    thread.join(DEADLINE)
    assert len(errors) == 1, "the one that was first gets its result from who knows whom, and is told as well"
    assert "'MainThread'" in errors[0]
    with pytest.raises(ArgumentError, match="the order of calls of this group was lost"):
        first.allreduce(np.ones(3), async_op=how == "async")
    first._turn.agree()  # as a step boundary does
    assert group.all(lambda c: float(c.allreduce(np.ones(3))[0])) == [3.0] * 3


def in_thread(call: Callable[[], Any], name: str = "another") -> Any:
    """What `call` returns or raises in a thread of its own."""
    out: list[Any] = []

    def run() -> None:
        try:
            out.append(call())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join(DEADLINE)
    return out[0]


@pytest.mark.parametrize("how", ["blocks", "async"])
def test_two_threads_that_start_ops_in_another_order_elsewhere_are_told_so(group: Group, how: str) -> None:
    """One adds ones and the other thousands: nobody gets 1001."""
    first, *others = group.callers
    works = [first.allreduce(np.ones(3), async_op=True) for _ in range(2)]
    told = in_thread(lambda: first.allreduce(np.full(3, 1000.0), async_op=how == "async"), "reader")
    assert isinstance(told, ArgumentError), told
    assert "thread 'reader' called a collective of a group in which another thread was in one" in str(told)
    with pytest.raises(ArgumentError, match="the order of calls of this group was lost"):
        first.allreduce(np.ones(3), async_op=how == "async")
    for amount in (1000.0, 1.0):
        group.all(lambda c, amount=amount: c.allreduce(np.full(3, amount)), only=tuple(c._me for c in others))
    for work in works:  # nobody knows with whose of the others they were matched
        with pytest.raises(ArgumentError, match="thread 'reader'"):
            work.wait()
    first._turn.agree()  # as a step boundary does
    assert group.all(lambda c: float(c.allreduce(np.ones(3))[0])) == [3.0] * 3


@pytest.mark.parametrize("how", ["blocks", "async"])
def test_a_thread_that_has_waited_for_the_ops_of_another_one_may_call(group: Group, how: str) -> None:
    def call(caller: Caller) -> list[float]:
        work = caller.allreduce(np.ones(3), async_op=True)

        def then() -> float:
            before = float(work.wait()[0])
            after = caller.allreduce(np.full(3, 2.0), async_op=how == "async")
            return before + 10 * float((after.wait() if how == "async" else after)[0])

        return [in_thread(then), float(work.wait()[0]), float(caller.allreduce(np.full(3, 3.0))[0])]

    assert group.all(call) == [[63.0, 3.0, 9.0]] * 3


def test_a_thread_of_autograd_may_call_while_an_op_of_the_script_is_in_flight(group: Group) -> None:
    """The script stands in its backward then, which says in which order they come."""

    def call(caller: Caller) -> list[float]:
        before = caller.allreduce(np.ones(3), async_op=True)
        started: queue.SimpleQueue[Any] = queue.SimpleQueue()
        _thread.start_new_thread(lambda: started.put(caller.allreduce(np.full(3, 2.0), async_op=True)), ())
        work = started.get(timeout=DEADLINE)
        after = caller.allreduce(np.full(3, 3.0), async_op=True)
        return [float(each.wait()[0]) for each in (before, work, after)]

    assert group.all(call, only=(1, 4, 6)) == [[3.0, 6.0, 9.0]] * 3


def test_a_mismatch_says_what_was_called(group: Group) -> None:
    (text,) = {str(e) for e in group.all(lambda c: c.broadcast(np.zeros(10, np.complex64), 0 if c.rank else 2))}
    assert "replica 1: op 0, broadcast(root=2, members and sizes " in text
    assert "replicas 4, 6: op 0, broadcast(root=0, members and sizes " in text
    assert ") of 10 x complex64" in text


def test_who_catches_up_gives_data_and_is_left_out_of_sums(group: Group) -> None:
    group.rig.view((1, 4, 6), contributing=(1, 6))
    assert group.all(lambda c: c.reduce_scatter(np.zeros(1), np.full(3, 10.0**c.rank), "avg").tolist()) == [[50.5]] * 3
    assert group.all(lambda c: c.reduce(np.full(1, 10.0**c.rank), 1).tolist()) == [[1.0], [101.0], [100.0]]
    assert group.all(lambda c: c.allgather(np.zeros(3), np.full(1, float(c.rank))).tolist()) == [[0.0, 1.0, 2.0]] * 3


def test_a_lost_root_fails_alike_and_the_rest_goes_on(group: Group) -> None:
    group.rig.view((1, 6))
    left = (1, 6)
    for doomed in (
        lambda c: c.broadcast(np.zeros(5), 1),
        lambda c: c.scatter(np.zeros(5), None, 1),
        lambda c: c.allgather(np.zeros(15), np.zeros(5)),
        lambda c: c.alltoall(np.zeros(15), np.zeros(15)),
        lambda c: c.gather(np.zeros(15) if c.rank == 0 else None, np.zeros(5), 0),
    ):
        errors = group.all(doomed, only=left)
        assert all(isinstance(error, LostError) for error in errors)
        assert len({str(error) for error in errors}) == 1
        assert "replica 4 was lost before" in str(errors[0])
    assert group.all(lambda c: c.gather(None, np.zeros(5), 1), only=left) == [None, None]  # nobody is left to take it
    sums = group.all(lambda c: c.reduce_scatter(np.zeros(1), np.full(3, 10.0**c.rank)).tolist(), only=left)
    assert sums == [[101.0], [101.0]]
    assert group.all(lambda c: c.reduce(np.ones(1), 2).tolist(), only=left) == [[1.0], [2.0]]
    assert group.all(lambda c: c.barrier(), only=left) == [None, None]
    mixed = group.all(lambda c: c.broadcast(np.zeros(5), 1) if c.rank else c.barrier(), only=left)
    assert all(isinstance(error, MismatchError) for error in mixed)


BAD: dict[str, tuple[Callable[[Caller], Any], str]] = {
    "root": (lambda c: c.broadcast(np.zeros(3), 3), r"root=3; expected a rank, 0 to 2"),
    "no root": (lambda c: c.broadcast(np.zeros(3), None), r"root=None; expected a rank, 0 to 2"),
    "half a root": (lambda c: c.reduce(np.zeros(3), 0.5), r"root=0.5; expected a rank, 0 to 2"),
    "no rank": (lambda c: c.send(np.zeros(3), "0"), r"cannot send to rank '0'; expected one of 0 to 2"),
    "no tag": (lambda c: c.recv(np.zeros(3), 0, 1.5), r"a tag of 1.5; expected an integer of 64 bits"),
    "no array": (lambda c: c.send([1, 2], 0), "ftcomm cannot take a value of type list; it has to be an array"),
    "negative root": (lambda c: c.reduce(np.zeros(3), -1), r"root=-1; expected a rank"),
    "allgather sizes": (lambda c: c.allgather(np.zeros(8), np.zeros(3)), "out of 9 x float64; got 8 x float64"),
    "allgather dtypes": (lambda c: c.allgather(np.zeros(9, np.int64), np.zeros(3)), "9 x float64; got 9 x int64"),
    "reduce_scatter": (lambda c: c.reduce_scatter(np.zeros(3), np.zeros(8)), "reduce_scatter of 8 x float64 among 3"),
    "bits": (lambda c: c.allreduce(np.zeros(3), "band"), "'band' of float64 is not defined; use it with integers"),
    "op": (lambda c: c.reduce(np.zeros(3), 0, "mean"), "op='mean' is not known; use one of sum, avg"),
    "gather": (lambda c: c.gather(np.zeros(9), np.zeros(3), (c.rank + 1) % 3), "gather needs out on rank"),
    "scatter": (lambda c: c.scatter(np.zeros(3), None, c.rank), "scatter needs x on rank"),
    "uneven without counts": (lambda c: c.alltoall(np.zeros(8), np.zeros(8)), "a multiple of 3"),
    "complex sum": (lambda c: c.reduce(np.zeros(3, np.complex64), 0), "complex64"),
    "objects": (lambda c: c.broadcast(np.array([{}]), 0), "dtype object"),
    "read-only result": (lambda c: c.broadcast(np.broadcast_to(np.zeros(1), 3), 0), "not writable"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_refused_before_anything_is_exchanged(case: str) -> None:
    call, text = BAD[case]
    with Rig((1, 4, 6)) as rig:
        caller = Caller(rig.members[4], (1, 4, 6))  # there is no view yet: a call that goes through would wait for ever
        with pytest.raises(ArgumentError, match=text):
            call(caller)


def test_ranks_may_be_integers_of_numpy(group: Group) -> None:
    sent = group.all(lambda c: c.broadcast(np.full(3, c.rank), np.argmax([0, 1, 0])).tolist())
    assert sent == [[1, 1, 1]] * 3


def test_counts_that_do_not_fit_are_told_to_all(group: Group) -> None:
    errors = group.all(lambda c: c.alltoall(np.zeros(3), np.zeros(3), [1, 1, 1], [1, 1, 1] if c.rank else [2, 1, 1]))
    assert isinstance(errors[0], ArgumentError)
    assert "in_counts=[2, 1, 1] for 3 elements" in str(errors[0])
    assert all(isinstance(error, MismatchError) and "rank 0 sends -1" in str(error) for error in errors[1:])
    errors = group.all(lambda c: c.alltoall(np.zeros(3), np.zeros(3), [1, 1, 1], [1, 1, 1] if c.rank else [0, 2, 1]))
    assert all(isinstance(error, MismatchError) for error in errors)
    assert "rank 0 sends 0 elements to rank 0, which expects 1" in str(errors[0])
    assert group.all(lambda c: c.barrier()) == [None] * 3


def test_all_give_one_member_no_more_than_its_mirrors_have_room_for() -> None:
    class Alone(Calls):
        roster = tuple(range(200))

        def _may_call(self) -> None:
            """It always may."""

    rooms: list[int] = []

    def run(op: Any) -> None:
        rooms.append(op.schedule.room)
        op.finish()

    exchange: Any = SimpleNamespace(run=run)
    group, x = Alone("", 0, None, HostCalls(200), exchange), np.zeros(4, np.uint8)
    group.allgather(np.zeros(800, np.uint8), x)
    group.gather(np.zeros(800, np.uint8), x, 0)
    group.reduce(x, 0)
    assert rooms == [slot_payload(200)] * 3
    assert rooms[0] < CHUNK
