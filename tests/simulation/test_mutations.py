"""Does the simulation bite? The product with one of its rules taken out: a broken promise has to be found within so
many seeds. What each of them breaks, and by which kind of history it is found, is said beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import ftcomm.collective.flight
import ftcomm.collective.operation
from ftcomm.collective.resume import all_reduce
from ftcomm.collective.stream import Stream, _Lane
from ftcomm.control import coordinator as c
from ftcomm.control import messages as m
from ftcomm.control.growth import Proposal, contributing
from ftcomm.control.leader import Leader
from ftcomm.control.member import Machine
from ftcomm.control.node import Node
from ftcomm.kernels.host.reduce import operand
from ftcomm.simulation.history import run
from ftcomm.simulation.rank import Rank
from ftcomm.simulation.script import Joiner

pytestmark = pytest.mark.protocol

Patch = pytest.MonkeyPatch


def no_stability(patch: Patch) -> None:
    """An op returns as soon as this member holds it."""
    patch.setattr(Stream, "stable", lambda self, op: 0 <= op.end <= self.taken)


def no_quiesce(patch: Patch) -> None:
    """What a member holds is told, and the exchange goes on."""
    quiesced = Rank._quiesced

    def go_on(self: Rank, view: Any) -> None:
        running = not self._parked
        quiesced(self, view)
        if running and not self.gone and self.stream is not None and self.stream.view.epoch < view.epoch:
            self._parked = False
            self.kick()

    patch.setattr(Rank, "_quiesced", go_on)


def no_epoch_in_words(patch: Patch) -> None:
    """A word of another epoch satisfies a wait."""

    def compare(self: Stream, word: int, count: int) -> bool:
        return all(words[word] & 0xFFFFFFFF >= count for words in self._words)

    patch.setattr(Stream, "_all", compare)


def late_words(patch: Patch) -> None:
    """A member enters an epoch without raising its words first."""
    publish = Stream._publish
    patch.setattr(Stream, "_publish", lambda self, word, count: publish(self, word, count) if count else None)


def own_input_first(patch: Patch) -> None:
    """Sums in another order on each member."""
    made = _Lane.__init__

    def spoiled(self: _Lane, stream: Stream, dtype: str, count: int, slot: int) -> None:
        made(self, stream, dtype, count, slot)
        me = operand(dtype, self.mine)
        others = [operand(dtype, self.posted[x]) for x in stream.view.contributors if x != stream.view.me]
        self.sources = [me, *others] if stream.view.me in stream.view.contributing else others

    patch.setattr(_Lane, "__init__", spoiled)


def all_again(patch: Patch) -> None:
    """After a loss every chunk is reduced again, FINAL or not."""
    patch.setattr(ftcomm.collective.operation, "resume_tasks", lambda number, chunks, *rest: all_reduce(chunks))


def not_atomic(patch: Patch) -> None:
    """An atomic op is repaired like any other."""
    tasks = ftcomm.collective.operation.resume_tasks
    patch.setattr(ftcomm.collective.operation, "resume_tasks", lambda *args: tasks(*args[:3], None))
    patch.setattr(ftcomm.collective.flight.Flight, "return_first", _return_first)


def _return_first(self: Any) -> None:
    self.returned += 1
    op = self.ops.popleft()
    op.finish(op.error)


def sends_before_it_persists(patch: Patch) -> None:
    """A view is told before it is written down."""
    decide = c.Coordinator._decide

    def hasty(self: c.Coordinator, *args: Any) -> list[c.Action]:
        return sorted(decide(self, *args), key=lambda action: isinstance(action, c.Persist))

    patch.setattr(c.Coordinator, "_decide", hasty)


def forgets_the_epoch(patch: Patch) -> None:
    """A restarted coordinator begins with the epoch before its last."""
    made = c.Coordinator.__init__

    def forgetful(self: c.Coordinator, *args: Any) -> None:
        made(self, *args)
        self._epoch = max(0, self._epoch - 1)

    patch.setattr(c.Coordinator, "__init__", forgetful)


def tells_no_view_again(patch: Patch) -> None:
    """Who connects again after the coordinator was restarted is not told the view that it missed."""
    patch.setattr(c.Coordinator, "_rejoined", lambda self, conn, join: [])


def progress_once(patch: Patch) -> None:
    """What a member holds is not said again over a link that was made again."""
    patch.setattr(Machine, "again", lambda self, replica: [])


def contributes_at_once(patch: Patch) -> None:
    """A joiner contributes before it has caught up."""
    applied = Proposal.applied

    def spoiled(self: Proposal, members: Any) -> Any:
        self.joins = {replica: contributing(member) for replica, member in self.joins.items()}
        return applied(self, members)

    patch.setattr(Proposal, "applied", spoiled)


def waits_for_who_prepares(patch: Patch) -> None:
    """A joiner is taken in before its script is ready."""
    register = c.Coordinator._register
    patch.setattr(
        c.Coordinator,
        "_register",
        lambda self, conn, join: register(self, conn, msgspec.structs.replace(join, ready=True)),
    )


def ready_by_one_rank(patch: Patch) -> None:
    """A replica says that it is ready when the first of its ranks is."""
    from_rank = Leader.from_rank

    def hasty(self: Leader, rank: int, message: m.Message) -> Any:
        if isinstance(message, m.Ready):
            self._told["Ready"].update(range(self.ranks))
        return from_rank(self, rank, message)

    patch.setattr(Leader, "from_rank", hasty)


def skips_a_kept_step(patch: Patch) -> None:
    """Of the steps that a joiner keeps the last is not applied."""
    at_boundary = Joiner.at_boundary

    def spoiled(self: Joiner, step: int) -> bool:
        del self.kept[3:]
        return at_boundary(self, step)

    patch.setattr(Joiner, "at_boundary", spoiled)


def finished_once(patch: Patch) -> None:
    """The end of a script is said once, whether the coordinator is there or not."""
    opened = Node.up_opened
    patch.setattr(Node, "up_opened", lambda self: opened(self)[:1])


MUTATIONS: dict[str, tuple[Callable[[Patch], None], str | None, int]] = {
    "no-stability": (no_stability, "kills", 400),
    "no-quiesce": (no_quiesce, "kills", 400),
    "no-epoch-in-words": (no_epoch_in_words, "kills", 400),
    "late-words": (late_words, "storm", 2000),
    "own-input-first": (own_input_first, "calm", 20),
    "all-again": (all_again, "kills", 400),
    "not-atomic": (not_atomic, "kills", 400),
    "sends-before-it-persists": (sends_before_it_persists, "calm", 5),
    "forgets-the-epoch": (forgets_the_epoch, "coordinator", 400),
    "tells-no-view-again": (tells_no_view_again, "coordinator", 400),
    "progress-once": (progress_once, "storm", 1000),
    "contributes-at-once": (contributes_at_once, "kills", 400),
    "waits-for-who-prepares": (waits_for_who_prepares, "kills", 100),
    "ready-by-one-rank": (ready_by_one_rank, "kills", 400),
    "skips-a-kept-step": (skips_a_kept_step, "growth", 2000),
    "finished-once": (finished_once, "quiet", 100),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_rule_taken_out_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, kind, seeds = MUTATIONS[name]
    patch(monkeypatch)
    assert any(run(seed, 2, 6, kind).broken for seed in range(seeds)), f"not noticed in {seeds} histories"
