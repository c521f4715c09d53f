"""Every message of the control plane, as typed structs in msgpack.

Who speaks to whom (a rank's Member machine lives beside the user's code, a Leader in rank 0 of each replica):

    Coordinator  <->  Leader      Join, Heartbeat, Promise, Installed, ... / NewView, Prepare, Expelled, ...
    Leader       <->  Member      the same, for each rank of its replica; in process for rank 0
    Leader       <->  Leader      Boundary: the agreement on a change of membership at a step boundary
    Member       <->  Member      Progress: what each holds, after a view change, within one shard group; Alive
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.decode import decode_with
from ftcomm.control.views import Address, Addresses, View


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


# Kinds of events that only the coordinator, or the launcher that it is embedded in, may log: launchers and chaos act on
# them. A rank reports other kinds.
RESERVED = frozenset(
    {"caught_up", "cut_off", "dismissed", "draining", "failed", "finished", "joined", "ready", "refused", "removed"}
    | {"outdated", "spared", "store", "suspect", "twins", "view"}
    | {"coordinator_started", "coordinator_stopped", "ending_removed", "process_exited", "process_started"}
    | {"restart_asked", "restarting"}
)


class Stage(enum.Enum):
    """How far a replica has got that has no view yet."""

    WAITING = "waiting"  # for others to come, as long as FTCOMM_INIT_TIMEOUT says
    JOINING = "joining"  # a running job takes it in at a step boundary, which may take any time


class Ending(enum.Enum):
    """Why a replica is not part of a job, or no longer."""

    FAILED = "failed"  # something is wrong, which the reason says
    TOO_LATE = "too late"  # the job is over: nothing is wrong, and there is nothing to do


# -- rank -> leader -> coordinator -------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a rank to its leader: where it is reached, and of which life of the replica it is, if it has
    been told before."""

    rank: t.Rank
    address: Address
    incarnation: t.Name = ""


class Join(Message, frozen=True):
    """First message of a leader to the coordinator, and again after every reconnection."""

    replica: t.Replica
    incarnation: t.Name
    ranks: Addresses
    epoch: t.Epoch  # of the view it runs in; 0: was never in one
    step: t.Step
    timeouts: tuple[float, float, float]  # heartbeat, floor and ceiling of an op; must be those of the whole job
    leaving: bool = False  # has asked to leave, which an earlier life of the coordinator may have heard
    ready: bool = False  # has said `Ready`, likewise
    caught_up: bool = False  # has said `CaughtUp`, likewise
    heard: t.Epoch = 0  # the newest view that it was told of, in force or not


class Heartbeat(Message, frozen=True):
    step: t.Step
    mute: t.Text = ""  # from a leader: what those of its ranks do that live and do not speak
    divided: t.Text = ""  # which rank a leader does not hear, or that a rank does not hear its leader; they may live


class Suspect(Message, frozen=True):
    """A member is lost. `proof`: the process of its rank `rank` is known to have ended; else it merely cannot be
    reached from here."""

    replica: t.Replica
    incarnation: t.Name
    reason: t.Text
    proof: bool
    rank: t.Rank = 0


class Reachable(Message, frozen=True):
    """A member that was suspected without proof can be reached again."""

    replica: t.Replica


class Stalled(Message, frozen=True):
    """A rank waits, in an op (or what `ftcomm.control.blame` numbers below 0); `waiting_on` are those who have to move,
    none if it does not wait. `due`: for longer than its deadline, said unasked; else the answer to `WhoWaits`."""

    rank: t.Rank
    epoch: t.Epoch
    op: t.Op
    waiting_on: t.Replicas
    due: bool


class Promise(Message, frozen=True):
    """Answer to `Prepare`: bound to the proposal if `ok`, else the boundary has been passed (now at `step`)."""

    proposal: t.Proposal
    ok: bool
    step: t.Step


class AtBoundary(Message, frozen=True):
    """A rank with a promise stands at its boundary and asks its leader what was decided."""

    proposal: t.Proposal


class Withdrawn(Message, frozen=True):
    """All leaders withdrew their promise together; the coordinator must give the proposal up."""

    proposal: t.Proposal


class Installed(Message, frozen=True):
    """The view is in force at this rank (from a leader: at all ranks of its replica)."""

    epoch: t.Epoch


class Ready(Message, frozen=True):
    """Of who joins a running job: the script stands before its first op or step boundary (from a leader: those of all
    ranks of its replica), so the others may wait for it from now on."""


class CaughtUp(Message, frozen=True):
    """The rank (from a leader: the replica) holds the state of everybody and can contribute."""

    step: t.Step


class Leave(Message, frozen=True):
    """Drain: this replica wants to leave at a step boundary. One of its ranks is enough to say so."""


class Finished(Message, frozen=True):
    """The script has ended. `ok`: its training is done, and the replica needs nothing more. Else it is lost to the
    others at once; `reason` says how it ended."""

    ok: bool = True
    reason: t.Text = ""


class Report(Message, frozen=True):
    """A line for the coordinator's event log: `kind` and JSON-able fields."""

    kind: t.Name
    fields: Annotated[dict[t.Name, t.Text | int | float | bool | None], Meta(max_length=256)]

    def __post_init__(self) -> None:
        if self.kind in RESERVED:
            raise ValueError(f"a report of the kind {self.kind!r}, which the coordinator itself uses; choose another")


# -- coordinator -> leader -> rank -------------------------------------------------------------------------------


class NewView(Message, frozen=True):
    """A view. At once if `view.step` is None; else the commit of `view.proposal`, in force from that boundary on."""

    view: View


class Welcome(Message, frozen=True):
    """Leader to rank, in answer to `Hello`: the life of the replica that the rank is part of."""

    incarnation: t.Name


class Queued(Message, frozen=True):
    """The replica is known and waits for its first view; `reason` says for what."""

    reason: t.Text
    stage: Stage = Stage.WAITING


class Registered(Message, frozen=True):
    """The replica may prepare to join the training under way. It is in no view, and nobody waits for it, until all its
    ranks have said `Ready`. `view` is the newest with this replica added, so that its script can be told who is there.
    """

    view: View


class Dismissed(Message, frozen=True):
    """The replica is in no view, and will come into none: it has asked to leave, or the job is being drained."""

    reason: t.Text


class Prepare(Message, frozen=True):
    """Will you stop at the boundary of `step` to hear whether membership changes there?"""

    proposal: t.Proposal
    epoch: t.Epoch  # the view that it would replace
    step: t.Step


class Cancel(Message, frozen=True):
    proposal: t.Proposal


class WhoWaits(Message, frozen=True):
    """Somebody has reported a stall: on whom does each rank wait?"""


class Decision(Message, frozen=True):
    """Leader to its ranks at the boundary: the view to install, or None to go on as before."""

    proposal: t.Proposal
    view: View | None


class Expelled(Message, frozen=True):
    reason: t.Text
    ending: Ending = Ending.FAILED


class FinishAck(Message, frozen=True):
    pass


class Ping(Message, frozen=True):
    """To be acknowledged by the kernel of who it is for (`ftcomm.control.liveness`); its process has nothing to do."""


# -- leader <-> leader -------------------------------------------------------------------------------------------


class Boundary(Message, frozen=True):
    """What a leader knows of a proposal when it reaches the boundary: the committed view, or None."""

    replica: t.Replica
    epoch: t.Epoch
    proposal: t.Proposal
    view: View | None


# -- member <-> member -------------------------------------------------------------------------------------------


class Final(msgspec.Struct, frozen=True):
    """Chunks that are FINAL with the same contributors. Bit i of `chunks` (little endian) is chunk i."""

    contributors: t.Replicas
    chunks: t.Bitmap


class OpProgress(msgspec.Struct, frozen=True):
    number: t.Op
    finals: Annotated[tuple[Final, ...], t.MANY]


class FailedOp(msgspec.Struct, frozen=True):
    number: t.Op
    message: t.Text
    lost: bool = False  # for want of data that a lost member had; else for calls that differ


class Roster(msgspec.Struct, frozen=True):
    """The members of a group in rank order, from the boundary of step `since` on, and who of them contributes then."""

    since: t.Step
    members: t.Replicas
    givers: t.Replicas


class Progress(msgspec.Struct, frozen=True):
    """Where a member stands when it has quiesced. Ops are numbered from 0 in their group and return in order."""

    returned: Annotated[int, Meta(ge=0, le=1 << 53)]  # ops that returned, with a result or an error
    ops: Annotated[tuple[OpProgress, ...], t.MANY]  # issued and not returned, in order
    failed: Annotated[tuple[FailedOp, ...], t.MANY] = ()  # with an error that must reach everybody, in flight or not
    fresh: bool = False  # a joiner that has run nothing: takes over the numbering of the others
    step: t.Step = -1  # the last boundary that it has passed
    epoch: t.Epoch = 0  # of the view that it comes from
    rosters: Annotated[tuple[Roster, ...], t.MANY] = ()  # as agreed upon when it entered that


class MemberProgress(Message, frozen=True):
    """`Progress` of `replica` for the view of `epoch`."""

    replica: t.Replica
    incarnation: t.Name
    epoch: t.Epoch
    progress: Progress


class Alive(Message, frozen=True):
    """A sign of life, over the link that would carry the progress: the network between two may be cut in silence."""

    replica: t.Replica
    incarnation: t.Name


AnyMessage = (
    Hello
    | Join
    | Heartbeat
    | Suspect
    | Reachable
    | Stalled
    | Promise
    | AtBoundary
    | Withdrawn
    | Installed
    | Ready
    | CaughtUp
    | Leave
    | Finished
    | Report
    | NewView
    | Welcome
    | Queued
    | Registered
    | Dismissed
    | Prepare
    | Cancel
    | WhoWaits
    | Decision
    | Expelled
    | FinishAck
    | Ping
    | Boundary
    | MemberProgress
    | Alive
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Raises `msgspec.DecodeError`, and nothing else, on what is no message, or one with numbers out of bounds."""
    message: AnyMessage = decode_with(_decoder, data)
    return message
