"""Which members a group has in rank order, as its users see it: alike on all of them, and changed at boundaries alone.

A loss is in force at once, in the middle of a step, and members hear of it at different moments: one has passed a
boundary before it knew, another passes it after. So the roster must not follow the view. It follows what members tell
each other anyway, when they enter a view: the last boundary that each has passed. They change the roster at the next
boundary after the last that any of them has passed, which all of them have still before them, and they cannot pass it
meanwhile: no boundary is passed between telling and entering.

What was scheduled before is told as well, since a member may have missed a view that others have entered. Of several
accounts that of the newest epoch counts; all that have entered an epoch have the same.

    view 4: 0 1 2 3     0 and 1 have passed boundary 7, 3 has passed 6, 2 is lost
    view 5: 0 1 3       the roster is 0 1 2 3 until boundary 8, 0 1 3 from then on
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import msgspec

from ftcomm.collective.plan import GroupView
from ftcomm.control.messages import Progress, Roster
from ftcomm.errors import CollectiveTimeout

NONE = -1  # boundaries passed: none yet


def agree(members: tuple[int, ...], givers: tuple[int, ...], progress: Mapping[int, Progress]) -> tuple[Roster, ...]:
    """The rosters from now on, as all `members` of a new view find them from what all of them have told. `givers` are
    those who contribute in it."""
    ran = [p for _, p in sorted(progress.items()) if not p.fresh]
    known = max(ran, key=lambda p: p.epoch).rosters if ran else ()
    if not known:
        return (Roster(NONE, members, givers),)
    passed = max(p.step for p in ran)
    if (known[-1].members, known[-1].givers) != (members, givers):
        known = (*(roster for roster in known if roster.since <= passed), Roster(passed + 1, members, givers))
    first = max((i for i, roster in enumerate(known) if roster.since <= min(p.step for p in ran)), default=0)
    return known[first:]


def at(rosters: tuple[Roster, ...], step: int) -> Roster:
    """That from the boundary of `step` to the next."""
    return next((roster for roster in reversed(rosters) if roster.since <= step), rosters[0])


class Standing:
    """What an exchange knows of boundaries and rosters."""

    _mutex: threading.Lock
    _changed: threading.Condition  # of that mutex; somebody has resumed or failed the exchange
    _frozen: bool
    _error: BaseException | None
    _step = NONE  # the last boundary that was passed
    _epoch = 0
    _rosters: tuple[Roster, ...] = ()

    def roster(self, step: int) -> Roster:
        """That from the boundary of `step` on. After the first view."""
        with self._mutex:
            return at(self._rosters, step)

    def stand(self, step: int) -> None:
        """A joiner begins as if it had passed the boundary of `step`."""
        with self._mutex:
            self._step = step

    def pass_boundary(self, step: int, timeout: float) -> Roster:
        """That from the boundary of `step` on, which is passed. Waits for the end of a view change that is under way;
        raises `CollectiveTimeout`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._frozen or self._error is not None, timeout):
                raise CollectiveTimeout(
                    f"boundary {step}: no view was agreed upon within {timeout:g}s. Is the coordinator reachable? "
                    "FTCOMM_OP_TIMEOUT sets half of that time."
                )
            self._step = step
            return at(self._rosters, step)

    def _told(self, progress: Progress) -> Progress:
        """With where this member stands. With the mutex, frozen."""
        return msgspec.structs.replace(progress, step=self._step, epoch=self._epoch, rosters=self._rosters)

    def _agree(self, view: GroupView, progress: Mapping[int, Progress]) -> None:
        """With the mutex, on the way into `view`."""
        self._rosters = agree(view.members, view.contributors, progress)
        self._epoch = view.epoch
