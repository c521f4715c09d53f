"""Which connections of readers are served in which epoch."""

from __future__ import annotations

import dataclasses
from typing import Any

from ftcomm.collective.pending import PendingReaders

NONCES = {1: "one", 2: "two"}


@dataclasses.dataclass(eq=False)
class Dialled:
    """In place of a `MirrorWriter`."""

    replica: int
    nonce: str
    epoch: int
    closed: bool = False
    one_epoch: bool = False  # as by NIXL

    def serves(self, epoch: int) -> bool:
        return epoch == self.epoch if self.one_epoch else epoch >= self.epoch

    def close(self) -> None:
        self.closed = True


def pending(*readers: Any) -> PendingReaders:
    made = PendingReaders()
    for reader in readers:
        made.add(reader)
    return made


def test_who_is_early_waits_and_who_dialled_for_an_earlier_epoch_is_served() -> None:
    early, late = Dialled(1, "one", 5), Dialled(2, "two", 3)
    waiting = pending(early, late)
    assert waiting.take(4, NONCES) == [late]
    assert waiting.take(5, NONCES) == [early]
    assert waiting.take(6, NONCES) == []
    assert not early.closed
    assert not late.closed


def test_another_life_of_a_replica_is_not_served() -> None:
    """A removed life, and one that comes with a later view."""
    old, coming = Dialled(1, "before", 3), Dialled(1, "next", 6)
    waiting = pending(old, coming)
    assert waiting.take(4, NONCES) == []
    assert old.closed
    assert not coming.closed
    assert waiting.take(6, {1: "next"}) == [coming]


def test_what_serves_one_epoch_is_served_in_that_one() -> None:
    readers = [Dialled(1, "one", 3, one_epoch=True), Dialled(2, "two", 4, one_epoch=True)]
    assert pending(*readers).take(4, NONCES) == [readers[1]]
    assert readers[0].closed


def test_the_newest_of_a_life_replaces_the_others_in_whatever_order_they_come() -> None:
    for order in ((3, 4), (4, 3), (4, 4)):
        first, second = (Dialled(1, "one", epoch) for epoch in order)
        (left,) = pending(first, second).take(4, NONCES)
        assert left is (first if order == (4, 3) else second)
        assert [first.closed, second.closed] == [left is second, left is first]


def test_a_connection_that_was_served_gives_way_to_one_that_came_since() -> None:
    for epoch, wins in ((3, False), (4, True), (5, True)):
        served, since = Dialled(1, "one", 4), Dialled(1, "one", epoch)
        waiting = pending(since)
        waiting.bring_back(served)  # type: ignore[arg-type]
        assert waiting.take(5, NONCES) == [since if wins else served]
        assert served.closed == wins
        assert since.closed != wins


def test_lives_that_come_and_go_are_not_kept_however_long_nothing_is_served() -> None:
    readers = [Dialled(1, f"life {epoch}", epoch) for epoch in range(5, 100)]
    waiting = pending(*readers, late := Dialled(1, "life 7", 7))
    assert [reader for reader in (*readers, late) if not reader.closed] == [readers[-1]]
    assert waiting.take(99, {1: "life 99"}) == [readers[-1]]
