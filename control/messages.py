"""Every message of the control plane, as typed structs in msgpack.

Who speaks to whom (a rank's Member machine lives beside the user's code, a Leader in rank 0 of each replica):

    Coordinator  <->  Leader      Join, Heartbeat, Promise, Installed, ... / NewView, Prepare, Expelled, ...
    Leader       <->  Member      the same, for each rank of its replica; in process for rank 0
    Leader       <->  Leader      Boundary: the agreement on a change of membership at a step boundary
    Member       <->  Member      Progress: what each holds, after a view change, within one shard group
"""

from __future__ import annotations

import msgspec

from ftcomm.control.views import Address, View

MAX_MESSAGE = 16 << 20  # bytes; a longer frame is refused before it is read


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


# -- rank -> leader -> coordinator -------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of a rank to its leader: where it is reached, and where it stands (after a reconnection)."""

    rank: int
    address: Address


class Join(Message, frozen=True):
    """First message of a leader to the coordinator, and again after every reconnection."""

    replica: int
    incarnation: str
    ranks: tuple[Address, ...]
    epoch: int  # of the view it runs in; 0: was never in one
    step: int


class Heartbeat(Message, frozen=True):
    step: int


class Suspect(Message, frozen=True):
    """A member is lost. `proof`: its process is known to have ended; else it merely cannot be reached from here."""

    replica: int
    incarnation: str
    reason: str
    proof: bool


class Reachable(Message, frozen=True):
    """A member that was suspected without proof can be reached again."""

    replica: int


class Stalled(Message, frozen=True):
    """An op (-1: a change of view) made no progress for the op timeout; `waiting_on` are those who have to move."""

    epoch: int
    op: int
    waiting_on: tuple[int, ...]


class Promise(Message, frozen=True):
    """Answer to `Prepare`: bound to the proposal if `ok`, else the boundary has been passed (now at `step`)."""

    proposal: int
    ok: bool
    step: int


class AtBoundary(Message, frozen=True):
    """A rank with a promise stands at its boundary and asks its leader what was decided."""

    proposal: int


class Withdrawn(Message, frozen=True):
    """All leaders withdrew their promise together; the coordinator must give the proposal up."""

    proposal: int


class Installed(Message, frozen=True):
    """The view is in force at this rank (from a leader: at all ranks of its replica)."""

    epoch: int


class CaughtUp(Message, frozen=True):
    """The rank (from a leader: the replica) holds the state of everybody and can contribute."""

    step: int


class Leave(Message, frozen=True):
    """Drain: this replica wants to leave at a step boundary."""


class Finished(Message, frozen=True):
    """The script has ended; the replica needs nothing more."""


class Report(Message, frozen=True):
    """A line for the coordinator's event log: `kind` and JSON-able fields."""

    kind: str
    fields: dict[str, str | int | float | bool | None]


# -- coordinator -> leader -> rank -------------------------------------------------------------------------------


class NewView(Message, frozen=True):
    """A view. At once if `view.step` is None; else the commit of `view.proposal`, in force from that boundary on."""

    view: View


class Welcome(Message, frozen=True):
    """Leader to rank, in answer to `Hello`: the life of the replica that the rank is part of."""

    incarnation: str


class Queued(Message, frozen=True):
    """The replica is known and waits for its first view; `reason` says for what."""

    reason: str


class Prepare(Message, frozen=True):
    """Will you stop at the boundary of `step` to hear whether membership changes there?"""

    proposal: int
    epoch: int  # the view that it would replace
    step: int


class Cancel(Message, frozen=True):
    proposal: int


class Decision(Message, frozen=True):
    """Leader to its ranks at the boundary: the view to install, or None to go on as before."""

    proposal: int
    view: View | None


class Expelled(Message, frozen=True):
    reason: str


class FinishAck(Message, frozen=True):
    pass


# -- leader <-> leader -------------------------------------------------------------------------------------------


class Boundary(Message, frozen=True):
    """What a leader knows of a proposal when it reaches the boundary: the committed view, or None."""

    replica: int
    epoch: int
    proposal: int
    view: View | None


# -- member <-> member -------------------------------------------------------------------------------------------


class Final(msgspec.Struct, frozen=True):
    """Chunks that are FINAL with the same contributors. Bit i of `chunks` (little endian) is chunk i."""

    contributors: tuple[int, ...]
    chunks: bytes


class OpProgress(msgspec.Struct, frozen=True):
    number: int
    finals: tuple[Final, ...]


class FailedOp(msgspec.Struct, frozen=True):
    number: int
    message: str


class Progress(msgspec.Struct, frozen=True):
    """Where a member stands when it has quiesced. Ops are numbered from 0 in their group and return in order."""

    returned: int  # ops that returned, with a result or an error
    ops: tuple[OpProgress, ...]  # issued and not returned, in order
    failed: tuple[FailedOp, ...] = ()  # returned with an error that must reach everybody
    fresh: bool = False  # a joiner that has run nothing: takes over the numbering of the others


class MemberProgress(Message, frozen=True):
    """`Progress` of `replica` for the view of `epoch`."""

    replica: int
    incarnation: str
    epoch: int
    progress: Progress


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
    | CaughtUp
    | Leave
    | Finished
    | Report
    | NewView
    | Welcome
    | Queued
    | Prepare
    | Cancel
    | Decision
    | Expelled
    | FinishAck
    | Boundary
    | MemberProgress
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Raises `msgspec.DecodeError` (or its `ValidationError`) on bytes that are no message."""
    message: AnyMessage = _decoder.decode(data)
    return message
