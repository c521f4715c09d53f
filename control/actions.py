"""The actions that the machines of a rank ask for: a `Machine` decides, its `RankNode` hands the action on, and the
driver carries it out.

Actions of all machines are frozen structs, which are made in a tenth of the time of a frozen dataclass, and in a
third of that of a tuple.
"""

from __future__ import annotations

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.views import View


class ToLeader(msgspec.Struct, frozen=True):
    """Send a message to the leader of this replica, by the host agent if there is one."""

    message: m.Message


class Freeze(msgspec.Struct, frozen=True):
    """Make links to the members of `view`, drop those to others, and stop the exchange; answer with `quiesced`."""

    view: View


class EnterView(msgspec.Struct, frozen=True):
    """Reach the memory of all members, which have stopped, as long as `RankNode.wants(view)`. Then start the exchange
    from what they hold. Answer with `entered`, or with `unreachable` and try again."""

    view: View
    progress: dict[int, m.Progress]


class Passed(msgspec.Struct, frozen=True):
    """The boundary at which the user's code stands is passed, in `view`. With `left` the replica has left the job
    there; it may never have been in a view."""

    view: View
    left: bool


class JoinPending(msgspec.Struct, frozen=True):
    """The replica is still joining; says why."""

    reason: str
    stage: m.Stage


class Known(msgspec.Struct, frozen=True):
    """The job runs and knows this replica, which is in no view. Let the script prepare, and say `Ready` when it has.
    `view` is the one in force with this replica added."""

    view: View


class GoOn(msgspec.Struct, frozen=True):
    """The step loop in which the script waits to join is over. Let the script go on to the next one, and say `Ready`
    again there."""


class Failed(msgspec.Struct, frozen=True):
    """This rank ends. Send what is still to be sent, then close the connections, so that no other rank waits for it."""

    reason: str
    ending: m.Ending = m.Ending.FAILED
