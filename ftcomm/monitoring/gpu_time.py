"""Counts each GPU-second of a job once: what its ranks did, and which interruption they pay for. Pure.

A replica does one thing at a time, so its seconds are a partition of the job's. What a failure costs the survivors is
known only afterwards, when somebody says since when they have waited: then seconds of training are moved, and never
more of them than the replica has trained since it last came back. So the prices of all interruptions can never exceed
what the job had.
"""

from __future__ import annotations

import dataclasses
import enum


class Use(enum.Enum):
    """The uses of GPU-seconds."""

    START = "start"  # before the first view
    TRAINING = "training"
    DETECTION = "detection"  # survivors, until somebody has noticed
    VIEW = "view"  # survivors, until the view without the lost ones is decided
    RESUME = "resume"  # survivors, until the interrupted ops go on
    ABSENCE = "absence"  # the lost replica, until it is in the job again
    CATCH_UP = "catch-up"  # the same, until it contributes again
    PAUSE = "pause"  # there were fewer replicas than the training needs


PRICED = (Use.DETECTION, Use.VIEW, Use.RESUME, Use.ABSENCE, Use.CATCH_UP)  # the phases of an interruption
OVER = None  # the replica has finished; its time counts for nothing


@dataclasses.dataclass
class _Account:
    use: Use | None
    since: float
    payer: int | None = None  # the interruption that pays for the present use
    moved: float = 0.0  # seconds x ranks that were taken from the present stretch of training


class GpuTime:
    """The GPU-seconds of one job. Times are seconds of one clock that does not go back; amounts are GPU-seconds, a rank
    counts as one GPU."""

    def __init__(self, ranks_per_replica: int) -> None:
        self._ranks = ranks_per_replica
        self._accounts: dict[int, _Account] = {}
        self._booked = dict.fromkeys(Use, 0.0)
        self._prices: dict[int, dict[Use, float]] = {}

    def use(self, replica: int) -> Use | None:
        account = self._accounts.get(replica)
        return OVER if account is None else account.use

    def begin(self, replica: int, use: Use | None, now: float, payer: int | None = None) -> None:
        """A replica does something else from `now` on; `payer` is the interruption that pays for it."""
        account = self._accounts.get(replica)
        if account is not None:
            self._settle(account, now)
            now = max(now, account.since)
        self._accounts[replica] = _Account(use, now, payer)

    def move(self, replica: int, use: Use, amount: float, payer: int | None, now: float) -> float:
        """Move up to `amount` of the replica's present stretch of training to `use`; returns how much that was."""
        account = self._accounts.get(replica)
        if account is None or account.use is not Use.TRAINING:
            return 0.0
        there = max(0.0, (now - account.since) * self._ranks - account.moved)
        taken = min(max(0.0, amount), there)
        account.moved += taken
        self._book(use, taken, payer)
        return taken

    def booked(self, now: float) -> dict[Use, float]:
        """Returns the GPU-seconds of each use until `now`."""
        total = dict(self._booked)
        for account in self._accounts.values():
            if account.use is not None:
                total[account.use] += self._open(account, now)
        return total

    def price(self, interruption: int, now: float) -> dict[Use, float]:
        """Returns what one interruption has cost until `now`, by phase."""
        price = dict.fromkeys(PRICED, 0.0) | self._prices.get(interruption, {})
        for account in self._accounts.values():
            if account.payer == interruption and account.use in price:
                price[account.use] += self._open(account, now)
        return price

    def forget(self, interruption: int) -> None:
        """Forget what one interruption has cost, which is complete."""
        self._prices.pop(interruption, None)

    def _open(self, account: _Account, now: float) -> float:
        return max(0.0, (now - account.since) * self._ranks - account.moved)

    def _settle(self, account: _Account, now: float) -> None:
        if account.use is not None:
            self._book(account.use, self._open(account, now), account.payer)

    def _book(self, use: Use, amount: float, payer: int | None) -> None:
        self._booked[use] += amount
        if payer is not None and use in PRICED:
            price = self._prices.setdefault(payer, {})
            price[use] = price.get(use, 0.0) + amount
