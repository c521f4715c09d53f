"""What a rank's machines want done: a `Machine` decides it, its `Node` hands it on, and what drives that does it."""

from __future__ import annotations

import dataclasses

from ftcomm.control import messages as m
from ftcomm.control.views import View


@dataclasses.dataclass(frozen=True)
class Freeze:
    """Make links to the members of `view`, drop those to others, and stop the exchange; answer with `quiesced`."""

    view: View


@dataclasses.dataclass(frozen=True)
class Resume:
    """All members have stopped: reach their memory, as long as `Node.wants(view)`, and set the exchange going from what
    they hold; answer with `resumed`, or with `unreachable` and try again."""

    view: View
    progress: dict[int, m.Progress]


@dataclasses.dataclass(frozen=True)
class Passed:
    """The boundary that the user's code stands at is passed, in `view`; `left`: by leaving the job. Of that it may have
    been in no view at all."""

    view: View
    left: bool


@dataclasses.dataclass(frozen=True)
class Queued:
    """Still joining; why."""

    reason: str
    stage: m.Stage


@dataclasses.dataclass(frozen=True)
class Known:
    """The job runs, and knows this replica, which is in no view: let the script prepare, and say `Ready` when it is.
    `view` is that in force, as if this replica were in it."""

    view: View


@dataclasses.dataclass(frozen=True)
class Failed:
    """The end for this rank. Say what is still to be said, then hang up, so that nobody waits for it."""

    reason: str
    ending: m.Ending = m.Ending.FAILED
