"""`FtWork`: what torch, and whoever chains on its future, gets of an op that ends well, badly, late or forgiven."""

from __future__ import annotations

import threading
import types
from datetime import timedelta
from typing import Any

import pytest
import torch

from ftcomm.collective.operation import stamp_of
from ftcomm.errors import CollectiveTimeout, LostError, MismatchError
from ftcomm.groups.group import Group
from ftcomm.kernels.call_codes import ELSEWHERE, UNKNOWN
from ftcomm.torch.work import FtWork, Futures


class Op:
    """Ends when it is told to, with `error` if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.over = error, threading.Event()

    def wait(self, timeout: float | None = None) -> Any:
        if not self.over.wait(timeout):
            raise CollectiveTimeout("not done")
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.over.is_set()


@pytest.fixture
def futures() -> Any:
    made = Futures(lambda error: isinstance(error, MismatchError))
    yield made
    made.close()


def test_the_result_is_there_before_anybody_hears_that_it_is(futures: Futures) -> None:
    op, x, brought = Op(), torch.zeros(2), []
    work = FtWork("op", [op], [x], futures, lambda: brought.append(x.add_(1)))
    future = work.get_future()
    assert not work.is_completed()
    assert not future.done()
    op.over.set()
    assert future.wait()[0] is x
    assert work.wait()
    assert work.is_success()
    assert work.result()[0] is x
    assert work.get_future() is future
    assert x.tolist() == [1.0, 1.0]
    assert len(brought) == 1, "brought twice"


def test_a_work_of_several_tensors_that_fails_leaves_none_of_them_registered(futures: Futures) -> None:
    registered = torch._C._distributed_c10d._get_work_registry_size
    op, tensors, before = Op(), [torch.zeros(1) for _ in range(3)], registered()
    work = FtWork("coalesced ops", [op], tensors, futures)
    work.register()
    assert registered() == before + 3
    op.error = LostError("gone")
    op.over.set()
    with pytest.raises(LostError, match="gone"):
        work.wait()
    assert registered() == before


def test_who_asks_whether_it_is_completed_may_use_the_result(futures: Futures) -> None:
    op, x = Op(), torch.zeros(1)
    work = FtWork("op", [op], [x], futures, lambda: x.add_(1))
    op.over.set()
    assert work.is_completed()
    assert x.tolist() == [1.0]


def test_an_error_comes_by_every_way(futures: Futures) -> None:
    op = Op(LostError("rank 1 was lost"))
    work = FtWork("op", [op], [torch.ones(1)], futures, lambda: pytest.fail("there is no result to bring"))
    future = work.get_future()
    op.over.set()
    with pytest.raises(RuntimeError, match="LostError: rank 1 was lost"):  # torch's futures know no other type
        future.wait()
    for _ in range(2):
        with pytest.raises(LostError, match="rank 1"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), LostError)


def test_a_timeout_ends_the_wait_and_not_the_op(futures: Futures) -> None:
    op = Op()
    work = FtWork("all_reduce of group 'x'", [op], [torch.ones(1)], futures, timeout=60)
    with pytest.raises(CollectiveTimeout, match="all_reduce of group 'x' timed out after 0"):
        work.wait(timedelta(milliseconds=1))
    assert not work.is_completed()
    op.over.set()
    assert work.wait()
    late = FtWork("op", [Op()], [torch.ones(1)], futures, timeout=0.01)
    told = threading.Event()
    future = late.get_future()
    future.add_done_callback(lambda _: told.set())
    assert told.wait(20), "nobody has looked at the clock"
    with pytest.raises(RuntimeError, match="CollectiveTimeout: op timed out"):
        future.wait()
    with pytest.raises(CollectiveTimeout):
        late.wait()


def test_of_a_forgiven_error_the_future_says_nothing(futures: Futures) -> None:
    """DDP ends its backward with what it had, and the step is repeated."""
    op, x = Op(MismatchError("different calls")), torch.ones(1)
    work = FtWork("op", [op], [x], futures)
    future = work.get_future()
    op.over.set()
    assert future.wait()[0] is x
    with pytest.raises(MismatchError):
        work.wait()


def test_who_raises_the_error_elsewhere_has_a_future_without_it(futures: Futures) -> None:
    op, x = Op(LostError("rank 1 was lost")), torch.ones(1)
    work = FtWork("op", [op], [x], futures)
    work.raised_elsewhere = True
    future = work.get_future()
    op.over.set()
    assert future.wait()[0] is x
    with pytest.raises(LostError):
        work.raise_error()


def test_what_is_chained_on_a_future_may_wait_for_another(futures: Futures) -> None:
    """As torch's PowerSGD hook does, twice, where the thread that gives futures their values runs it."""
    outer, over, told = Op(), Op(), threading.Event()
    over.over.set()
    sums: list[float] = []

    def chained(done: torch.futures.Future[Any]) -> list[torch.Tensor]:
        x = done.value()[0] + 1
        sums.append(float(x))
        inner = FtWork("inner", [over], [x], futures).get_future()
        return (inner.then(chained) if len(sums) < 3 else inner).wait()  # type: ignore[no-any-return]

    future = FtWork("outer", [outer], [torch.zeros(1)], futures).get_future().then(chained)
    future.add_done_callback(lambda _: told.set())
    outer.over.set()
    assert told.wait(20), "the thread waits for itself"
    assert sums == [1.0, 2.0, 3.0]
    assert future.value()[0].item() == 3.0


def test_futures_of_what_is_asked_for_after_the_end(futures: Futures) -> None:
    op = Op()
    op.over.set()
    work = FtWork("op", [op], [torch.ones(1)], futures)
    futures.close()
    assert work.get_future().wait()[0].tolist() == [1.0]


def test_what_is_chained_on_a_future_is_of_no_known_step(futures: Futures) -> None:
    """It runs in the thread of the step loop on one member and in that of the futures on another, as it happens; the
    two must not be taken for different calls."""
    op, stamps = Op(), []
    group = types.SimpleNamespace(_loop=threading.get_ident(), _stamp=stamp_of(7))
    work = FtWork("all_reduce of group 'x'", [op], [torch.ones(1)], futures)
    chained = work.get_future().then(lambda done: stamps.append(Group._of_another_thread(group)))  # type: ignore[arg-type]
    assert Group._of_another_thread(group) == ELSEWHERE  # type: ignore[arg-type]
    op.over.set()
    chained.wait()
    assert stamps == [UNKNOWN]
