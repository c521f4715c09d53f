"""The members of a group in rank order, as its users see them: equal on all of them, and changed only at boundaries.

A loss is in force at once, in the middle of a step, and members hear of it at different moments: one has passed a
boundary before it knew, another passes it after. So the roster must not follow the view. It follows what members tell
each other anyway when they enter a view: the last boundary that each has passed. They change the roster at the next
boundary after the last that any of them has passed. All of them have that boundary still before them, and cannot pass
it meanwhile: no boundary is passed between telling and entering.

What was scheduled before is told as well, since a member may have missed a view that others have entered. Of several
accounts that of the newest epoch counts; all that have entered an epoch have the same.

    view 4: 0 1 2 3    0 and 1 have passed boundary 7, 3 has passed 6, 2 is lost
    view 5: 0 1   3    the roster is 0 1 2 3 until boundary 8, 0 1 3 from then on
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from ftcomm.collective.plan import GroupView
from ftcomm.control.messages import Progress, Roster
from ftcomm.control.running_time import RunningTimer
from ftcomm.errors import CollectiveTimeout

NONE = -1  # boundaries passed: none yet


def agree(
    members: tuple[int, ...], contributors: tuple[int, ...], progress: Mapping[int, Progress]
) -> tuple[Roster, ...]:
    """Returns the rosters from now on, as all `members` of a new view find them from what all of them have told.
    `contributors` are those in that view."""
    ran = [p for _, p in sorted(progress.items()) if not p.fresh]
    known = max(ran, key=lambda p: p.epoch).rosters if ran else ()
    if not known:
        return (Roster(NONE, members, contributors),)
    passed = max(p.step for p in ran)
    if (known[-1].members, known[-1].contributors) != (members, contributors):
        known = (*(roster for roster in known if roster.since <= passed), Roster(passed + 1, members, contributors))
    first = max((i for i, roster in enumerate(known) if roster.since <= min(p.step for p in ran)), default=0)
    return known[first:]


def at(rosters: tuple[Roster, ...], step: int) -> Roster:
    """Returns the roster from the boundary of `step` to the next."""
    return next((roster for roster in reversed(rosters) if roster.since <= step), rosters[0])


class RosterTracker:
    """The rosters that one member knows, and where it stands between boundaries."""

    def __init__(self) -> None:
        self._step = NONE  # the last boundary that was passed
        self._epoch = 0
        self._rosters: tuple[Roster, ...] = ()

    def at(self, step: int) -> Roster:
        """Returns the roster from the boundary of `step` on. To be called after the first view."""
        return at(self._rosters, step)

    def passed(self, step: int) -> None:
        """Note that the boundary of `step` is passed; a joiner begins in this way."""
        self._step = step

    def told(self, progress: Progress) -> Progress:
        """Add the boundary at which this member stands; it passes none before it enters a view."""
        return msgspec.structs.replace(progress, step=self._step, epoch=self._epoch, rosters=self._rosters)

    def agree(self, view: GroupView, progress: Mapping[int, Progress]) -> None:
        """Settle the rosters on the way into `view`."""
        self._rosters = agree(view.members, view.contributors, progress)
        self._epoch = view.epoch


def pass_boundary(
    rosters: RosterTracker,
    changed: threading.Condition,
    moves: Callable[[], bool],
    step: int,
    timeout: float,
    changes: Callable[[], int] = lambda: 0,
    away: Callable[[], float] = lambda: 0.0,
) -> Roster:
    """Pass the boundary of `step`, and return the roster from there on. Waits for the end of a view change under way:
    until `moves` holds, which may be once `changed` was told. Raises `CollectiveTimeout` after `timeout` seconds; they
    begin anew with each of the `changes` of view, and those `away` do not count."""
    timer = RunningTimer(timeout, time.monotonic, changes, away)
    with changed:
        while not moves():
            part = timer.part()
            if not part:
                raise CollectiveTimeout(
                    f"boundary {step}: no view was agreed upon within {timeout:g}s. Is the coordinator reachable? "
                    "FTCOMM_OP_TIMEOUT sets half of that time."
                )
            changed.wait(part)
        rosters.passed(step)
        return rosters.at(step)
