"""The exchange of a device, at one member, between its words and its calls: what is frozen when, and in which order."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ftcomm.collective.plan import GroupView
from ftcomm.control.messages import FailedOp, Progress
from ftcomm.engines.gpu_kernel.copies import Copies
from ftcomm.engines.gpu_kernel.device import KernelLaunch
from ftcomm.engines.gpu_kernel.exchange import DeviceExchange
from ftcomm.engines.gpu_kernel.launch import lane_word
from ftcomm.engines.gpu_kernel.layout import INTERPRETED
from ftcomm.engines.gpu_kernel.operation import KernelOperation
from ftcomm.errors import ArgumentError, CollectiveTimeout, FtcommError, MismatchError
from ftcomm.kernels.device import INTERPRETED as INTERPRETING
from ftcomm.kernels.device import allreduce, words
from ftcomm.kernels.epochs import COUNTER
from ftcomm.transport.segment import Segment

if not INTERPRETING:
    pytest.skip("TRITON_INTERPRET=1 is not set: kernels are compiled here", allow_module_level=True)

from ftcomm.engines.gpu_kernel.interpreted import InterpretDevice

LANE_WORDS = [lane_word(lane, word) for lane in range(INTERPRETED.lanes) for word in range(3)]


class Played(InterpretDevice):
    """On which the test plays the kernel, and callers wait for marks, as on a GPU."""

    blocking = False
    into_graph = False

    def __init__(self, segment: Segment) -> None:
        super().__init__(segment)
        self.launches: list[KernelLaunch] = []
        self.released: list[object] = []
        self.replayed = True  # all that was

    def capturing(self) -> bool:
        return self.into_graph

    def launch(self, launch: KernelLaunch) -> None:
        self.launches.append(launch)

    def mark(self) -> object:
        return len(self.launches)

    def release(self, mark: object) -> None:
        self.released.append(mark)

    def wait_replays(self, seconds: float) -> bool:
        return self.replayed

    def settle(self, seconds: float) -> bool:
        return True

    def begin(self, template: int, number: int) -> None:
        ctl = self.ctl
        ctl[words.BEGUN] += 1
        ctl[words.TEMPLATE], ctl[words.BASE_OF] = template, 0
        ctl[words.STARTED] = number + 1

    def find_differences(self, number: int) -> None:
        """Lane 0 has seen calls that differ."""
        self.ctl[words.SEEN], self.ctl[words.SEEN + 1] = number, 5 << 16
        self.ctl[words.MISMATCHED] = number + 1

    def leave(self, *, returned: bool) -> None:  # type: ignore[override]
        ctl = self.ctl
        if returned:
            if ctl[words.TEMPLATE] < words.CAPTURED:
                ctl[words.CALLED] = ctl[words.TEMPLATE] + 1
            ctl[words.RETURNED] = ctl[words.STARTED]
        ctl[words.FINISHED] = ctl[words.BEGUN]


class Member:
    def __init__(self, device: type[InterpretDevice] = InterpretDevice) -> None:
        self.device = device(Segment(INTERPRETED))
        self.failed: list[BaseException] = []
        self.exchange = DeviceExchange(
            0,
            self.device,
            deadline_floor=30,
            deadline_ceiling=30,
            give_up=60,
            on_stall=lambda stall: None,
            on_failed=self.failed.append,
        )

    def freeze(self) -> Progress:
        quiet = threading.Event()
        self.exchange.freeze(quiet.set)
        assert quiet.wait(30)
        return self.exchange.progress()

    def enter(self, epoch: int, progress: Progress) -> None:
        self.exchange.enter(GroupView(epoch, 0, (0,), frozenset((0,))), {}, {0: progress})

    def submit(self, value: float = 1.0, **how: bool) -> KernelOperation:
        op = KernelOperation(np.full(100, value), "float64", "sum", INTERPRETED.chunk, **how)
        self.exchange.submit(op)
        return op


@pytest.fixture
def member() -> Iterator[Member]:
    member = Member()
    yield member
    member.exchange.fail(FtcommError("the test is over"))
    assert member.device.settle(30)
    member.device.close()


class Written:
    """Words that say in which order they are written."""

    def __init__(self, name: str, words: memoryview, order: list[tuple[str, int, int]]) -> None:
        self.name, self.words, self.order = name, words, order

    def __getitem__(self, at: Any) -> Any:
        return self.words[at]

    def __setitem__(self, at: int, value: int) -> None:
        self.order.append((self.name, at, value))
        self.words[at] = value


def test_words_are_raised_before_the_table_and_the_table_is_written_before_programs_may_run(member: Member) -> None:
    device, order = member.device, []  # type: ignore[var-annotated]
    lanes: Any = Written("lane", device.own.lanes, order)
    device.own = device.own._replace(lanes=lanes)
    member.exchange.core.ctl = Written("ctl", device.ctl, order)  # type: ignore[assignment]
    for epoch in (3, 7):
        progress = member.freeze()
        order.clear()
        member.enter(epoch, progress)
        raised = [("lane", at, epoch << COUNTER) for at in LANE_WORDS]
        table = [("ctl", words.NEWS + at) for at in range(words.VIEW_WORDS)]
        assert order[: len(raised)] == raised
        assert [each[:2] for each in order[len(raised) : -2]] == table
        assert order[-2:] == [("ctl", words.RETURNED, order[-2][2]), ("ctl", words.OPEN, epoch)]
        assert member.submit().wait(30)


def test_an_op_that_is_launched_while_frozen_counts_as_not_called_and_runs_in_the_next_epoch(member: Member) -> None:
    member.enter(1, member.freeze())
    assert member.submit().wait(30)
    member.freeze()
    op = member.submit()
    assert not op.wait(0.3)
    progress = member.freeze()  # quiet at once: a launch that holds is no launch that runs
    assert (progress.returned, progress.ops) == (1, ())
    member.enter(2, progress)
    assert op.wait(30)
    assert (op.error, op.number, op.finals) == (None, 1, [(0,)])


def test_who_joins_late_numbers_its_ops_on(member: Member) -> None:
    """It has called two before it is in any view."""
    first, second = member.submit(), member.submit()
    progress = member.freeze()
    assert progress.fresh
    view = GroupView(5, 0, (0,), frozenset((0,)))
    member.exchange.enter(view, {}, {0: progress, 9: Progress(returned=40, ops=())})
    assert first.wait(30)
    assert second.wait(30)
    assert [first.number, second.number, member.submit().number] == [40, 41, 42]
    member.exchange.wait_all(30)
    assert member.freeze().returned == 43


def test_the_end_fails_what_holds_and_what_comes_later(member: Member) -> None:
    member.enter(1, member.freeze())
    member.freeze()
    held = member.submit()
    member.exchange.fail(FtcommError("that was it"))
    assert held.wait(30)
    later = member.submit()
    assert later.done
    assert str(held.error) == str(later.error) == "that was it"
    with pytest.raises(FtcommError, match="that was it"):
        member.exchange.progress()
    assert not member.failed  # it was told from outside


def test_a_kernel_that_breaks_is_the_end(member: Member) -> None:
    member.enter(1, member.freeze())
    member.device.copy(np.zeros(3), np.zeros(2))  # cannot be
    op = member.submit()
    assert op.wait(90)
    assert "a kernel has failed in the interpreter" in str(op.error)
    assert [str(error) for error in member.failed] == [str(op.error)]


def test_a_kernel_that_breaks_when_it_has_begun_is_the_end_at_once(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launch never says that it has ended, and nobody waits for that."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    member.enter(1, member.freeze())
    monkeypatch.setattr(allreduce, "post", broken)
    op = member.submit()
    assert op.wait(member.exchange.give_up / 2)
    assert "a kernel has failed in the interpreter" in str(op.error)


def test_accounts_that_contradict_each_other_are_the_end(member: Member) -> None:
    member.enter(1, member.freeze())
    member.freeze()
    op = member.submit()
    member.exchange.enter(
        GroupView(2, 0, (0,), frozenset((0,))), {}, {0: Progress(returned=0, ops=()), 1: Progress(returned=1, ops=())}
    )
    assert op.wait(30)
    assert "returned elsewhere, but is not FINAL here" in str(op.error)
    assert len(member.failed) == 1


# ---- where callers do not wait, and graphs --------------------------------------------------------------------------


@pytest.fixture
def played() -> Iterator[tuple[Member, Played]]:
    """A member in its first view."""
    member = Member(Played)
    member.enter(1, member.freeze())
    assert isinstance(member.device, Played)
    yield member, member.device
    member.exchange.fail(FtcommError("the test is over"))


def until(what: str, condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.001)


def capture(member: Member, device: Played, **how: bool) -> KernelOperation:
    device.into_graph = True
    op = member.submit(**how)
    assert member.exchange.wait(op)
    device.into_graph = False
    return op


def test_an_error_for_which_nobody_waits_is_raised_by_the_next_call_once(played: tuple[Member, Played]) -> None:
    member, device = played
    op = member.submit()
    assert member.exchange.wait(op), "the caller has to wait for more than its stream"
    assert device.released == [1]
    finish, kept = op.finish, []
    op.finish = lambda error=None: (kept.append(member.exchange.core.unheard), finish(error))[1]  # type: ignore[method-assign]
    device.begin(0, 0)
    device.find_differences(0)
    until("the host has heard", lambda: device.ctl[words.HEARD] == 1)
    device.leave(returned=True)
    assert op.wait(30)
    assert kept == [op.error], "who calls when the op is done would not hear of it"
    with pytest.raises(MismatchError, match="made different calls"):
        member.submit()
    device.begin(1, 1)
    device.leave(returned=True)
    assert member.submit().template == 1  # the call that raised was none


def test_a_driver_that_is_stuck_holds_up_neither_a_view_change_nor_an_op(
    played: tuple[Member, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind the op that is to go on."""
    member, device = played
    asked, over, quiet = threading.Event(), threading.Event(), threading.Event()

    def stuck() -> None:
        asked.set()
        over.wait(60)

    monkeypatch.setattr(device, "check", stuck)
    op = member.submit()
    device.begin(0, 0)
    assert asked.wait(30)
    member.exchange.freeze(quiet.set)
    assert not quiet.is_set()
    device.leave(returned=False)
    assert quiet.wait(30)
    member.enter(2, member.exchange.progress())
    device.begin(0, 0)
    device.leave(returned=True)
    assert op.wait(30)
    over.set()


def test_an_error_for_which_somebody_waits_is_not_raised_elsewhere(played: tuple[Member, Played]) -> None:
    member, device = played
    op = member.submit()
    device.begin(0, 0)
    device.find_differences(0)
    until("the host has heard", lambda: device.ctl[words.HEARD] == 1)
    device.leave(returned=True)
    assert op.wait(30)
    assert isinstance(op.error, MismatchError)
    member.submit()


@pytest.mark.parametrize("in_graph", [False, True])
def test_what_fails_in_a_view_change_is_raised_by_the_next_call_too(
    played: tuple[Member, Played], in_graph: bool
) -> None:
    """The others have found out that the calls differ; here it was broken off before."""
    member, device = played
    op = capture(member, device) if in_graph else member.submit()
    assert member.exchange.wait(op)
    device.begin(op.template, 0)
    device.leave(returned=False)
    mine = member.freeze()
    assert [op.number for op in mine.ops] == [0]
    theirs = Progress(returned=0, ops=mine.ops, failed=(FailedOp(0, "they differ"),))
    member.exchange.enter(GroupView(2, 0, (0,), frozenset((0,))), {}, {0: mine, 9: theirs})
    assert device.ctl[words.RETURNED] == 1
    with pytest.raises(MismatchError, match="they differ"):
        member.submit()


def test_replays_count_among_the_ops_of_the_group(played: tuple[Member, Played]) -> None:
    """Two replays, a call, another replay that begins and is broken off: the fourth op. What was called behind it has
    no part in that."""
    member, device = played
    graph = capture(member, device)
    assert [launch.template for launch in device.launches] == [words.CAPTURED]
    first, second = member.submit(), member.submit()
    for number, template in enumerate((graph.template, graph.template, first.template)):
        device.begin(template, number)
        device.leave(returned=True)
    assert first.wait(30)
    assert not second.done
    device.begin(graph.template, 3)
    device.leave(returned=False)
    progress = member.freeze()
    assert (progress.returned, [op.number for op in progress.ops]) == (3, [3])
    assert second.number == 4
    assert member.freeze() == progress
    member.enter(2, progress)
    news = device.ctl[words.NEWS : words.NEWS + words.VIEW_WORDS]
    assert [news[i] for i in (words.EPOCH, words.RESUMED, words.TODO_OF, words.NTODO)] == [2, 3, 4, 1]
    assert len(device.launches) == 3, "what was broken off goes on by itself"
    device.begin(graph.template, 3)
    device.leave(returned=True)
    device.begin(second.template, 4)
    device.leave(returned=True)
    assert second.wait(30)
    progress = member.freeze()
    assert (progress.returned, progress.ops) == (5, ())


def test_a_replay_that_differs_may_yet_be_broken_off(played: tuple[Member, Played]) -> None:
    """So its error is kept until it has returned, or is in flight."""
    member, device = played
    graph = capture(member, device)
    device.begin(graph.template, 0)
    device.find_differences(0)
    device.leave(returned=False)
    progress = member.freeze()
    assert [failed.number for failed in progress.failed] == [0]
    assert device.ctl[words.HEARD] == 1
    member.enter(2, progress)
    with pytest.raises(MismatchError, match="made different calls"):
        member.exchange.wait_all(30)
    member.exchange.wait_all(30)


def test_a_wait_for_all_waits_for_replays_and_hears_their_errors(played: tuple[Member, Played]) -> None:
    member, device = played
    graph = capture(member, device)
    device.replayed = False
    device.begin(graph.template, 0)
    with pytest.raises(CollectiveTimeout, match="still replaying op 0"):
        member.exchange.wait_all(0.01)
    device.find_differences(0)
    device.leave(returned=True)
    device.replayed = True
    with pytest.raises(MismatchError):
        member.exchange.wait_all(30)
    assert device.ctl[words.HEARD] == 1


def test_whose_input_replays_had(played: tuple[Member, Played]) -> None:
    member, device = played
    graph = capture(member, device)
    assert member.exchange.common(reset=True) is None
    device.begin(graph.template, 0)
    device.leave(returned=True)
    member.exchange.wait_all(30)
    assert member.exchange.common(reset=True) == (0,)
    member.exchange.wait_all(30)
    assert member.exchange.common() is None


def test_nothing_is_captured_before_there_is_a_view_or_after_the_end() -> None:
    member = Member(Played)
    assert isinstance(member.device, Played)
    member.device.into_graph = True
    with pytest.raises(FtcommError, match="before this member is in a view"):
        member.submit()
    member.device.into_graph = False
    member.enter(1, member.freeze())
    member.exchange.fail(FtcommError("that was it"))
    member.device.into_graph = True
    assert str(member.submit().error) == "that was it"


def test_the_membership_changes_while_a_graph_is_captured(played: tuple[Member, Played]) -> None:
    """What was captured before belongs to the graph as what comes behind: each is launched once, and runs in the view
    of its replay."""
    member, device = played
    first = capture(member, device)
    device.into_graph = True
    called = member.exchange.core.called
    member.enter(2, member.freeze())
    device.into_graph = False
    second = capture(member, device)
    assert [launch.template for launch in device.launches] == [first.template, second.template]
    assert (member.exchange.core.called, member.failed) == (called, [])
    for number, op in enumerate((first, second)):
        device.begin(op.template, number)
        device.leave(returned=number == 0)
    progress = member.freeze()
    assert (progress.returned, [op.number for op in progress.ops]) == (1, [1])
    member.enter(3, progress)
    device.begin(second.template, 1)
    device.leave(returned=True)
    member.exchange.wait_all(30)
    assert member.freeze().returned == 2


def test_no_memory_for_the_copy_of_an_atomic_op_ends_this_rank(
    played: tuple[Member, Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others go on without it: it has said that it takes part."""
    member, device = played

    def full(array: object) -> None:
        raise MemoryError("CUDA out of memory")

    monkeypatch.setattr(device, "empty", full)
    op = KernelOperation(np.zeros(100_000), "float64", "sum", INTERPRETED.chunk, atomic=True)
    with pytest.raises(MemoryError, match="CUDA out of memory"):
        member.exchange.submit(op)
    assert "CUDA out of memory" in str(member.failed[0])
    assert op.wait(30)
    assert op.error is member.failed[0]


def test_what_has_to_be_copied_cannot_be_captured(member: Member) -> None:
    """The copies would not be replayed."""
    array = np.zeros((4, 4))[:, ::2]
    with member.device.capture(), pytest.raises(ArgumentError, match="cannot be captured"):
        member.device.stage(array)
    assert member.device.stage(array).finish is not None


@pytest.mark.parametrize("status", [words.OK, words.ABORTED])
def test_a_freeze_stops_copies_and_waits_for_them(member: Member, status: int) -> None:
    """Else the memory that they read could be another's, or gone."""
    member.enter(1, member.freeze())
    begun, end, quiet, ended = threading.Event(), threading.Event(), threading.Event(), []

    def body(copies: Copies) -> int:
        begun.set()
        assert end.wait(30)
        ended.append(copies.stop())
        return status

    thread = threading.Thread(target=lambda: ended.append(member.exchange.copy((0,), body)))
    thread.start()
    assert begun.wait(30)
    with pytest.raises(FtcommError, match="one thread at a time"):
        member.exchange.copy((0,), body)
    member.exchange.freeze(quiet.set)
    assert not quiet.wait(0.2)
    end.set()
    assert quiet.wait(30)
    thread.join()
    assert ended == [True, 1 if status == words.OK else None]
    assert member.exchange.copy((0,), body) is None  # frozen
    member.enter(2, member.exchange.progress())
    assert member.exchange.copy((0, 1), body) is None  # not the roster
