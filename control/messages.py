"""Every message of the control plane, as typed structs in msgpack.

Who speaks to whom (a rank's Member machine lives beside the user's code, the Leader of a replica in a process of its
own):

    Coordinator  <->  Leader      Join, Heartbeat, Promise, Installed, ... / NewView, Prepare, Removed, ...
    Leader       <->  Member      the same, for each rank of its replica; in process if it has one rank
    Leader       <->  Leader      Boundary: the agreement on a change of membership at a step boundary; it goes through
                                  the links of shard 0 of each replica
    Leader       <->  Host agent  of another host, for all ranks there: Enclosed, each a message of the lines before
    Member       <->  Member      MemberProgress: what each holds, after a view change, within one shard group; Alive,
                                RemovedIn
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ftcomm.control import field_types as t
from ftcomm.control.decode import decode_with
from ftcomm.control.script_end import ScriptEnd
from ftcomm.control.views import Address, Addresses, Member, View


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages. On the wire a message is an array, of the class name and of its fields in order."""


Event = dict[str, Any]  # of a job, as the coordinator and the launcher make them; `mono` and `time` are seconds

# Only the coordinator, or the launcher around it, may log events of these kinds, since launchers and chaos act on them.
# A rank reports other kinds.
RESERVED = frozenset(
    {
        "caught_up",
        "cut_off",
        "diagnosis",
        "dismissed",
        "draining",
        "failed",
        "finished",
        "joined",
        "ready",
        "refused",
        "removed",
    }
    | {"ended", "outdated", "not_removed", "postponed", "store", "suspect", "view"}
    | {"coordinator_started", "coordinator_stopped", "ending_removed", "process_exited", "process_started"}
    | {"leave_asked", "restart_asked", "restarting"}
)


class Stage(enum.Enum):
    """The stage of a replica that has no view yet."""

    WAITING = "waiting"  # it waits for others, for FTCOMM_INIT_TIMEOUT at most
    JOINING = "joining"  # a running job takes it in at a step boundary, however late that is


class Ending(enum.Enum):
    """The way in which a replica came not to be, or no longer to be, part of a job."""

    FAILED = "failed"  # something is wrong; the reason says what
    TOO_LATE = "too late"  # the job is over, so there is nothing to do


# -- rank -> leader -> coordinator -------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The first message of a rank to its leader. It says where the rank is reached, and names the life of the replica
    that the rank belongs to, if the rank has been told one before."""

    shard: t.Shard
    address: Address
    incarnation: t.Name = ""
    replicas: t.ReplicaNumber = 0  # how many the job has, as this rank was told; 0: unknown


class Join(Message, frozen=True):
    """The first message of a leader to the coordinator; the leader repeats it on every new connection."""

    replica: t.ReplicaNumber
    incarnation: t.Name
    ranks: Addresses
    epoch: t.Epoch  # the view that the replica runs in; 0: it was never in one
    step: t.Step
    timeouts: tuple[float, float, float]  # heartbeat, floor and ceiling of an op; must be those of the whole job
    leaving: bool = False  # the replica has asked to leave; an earlier coordinator may have heard that
    ready: bool = False  # the replica has said `Ready`
    caught_up: bool = False  # the replica has said `CaughtUp`
    heard: t.Epoch = 0  # the newest view that the leader was told of, in force or not
    loop: t.Loop = 0  # the newest step loop that a rank has come to; of a joiner that is ready, as in `Ready`
    replicas: t.ReplicaNumber = 0  # how many the job has, as the ranks were told; 0: unknown


class Heartbeat(Message, frozen=True):
    step: t.Step
    mute: t.Text = ""  # what a rank of the leader does that lives and does not speak
    divided: t.Text = ""  # a rank and its leader do not hear each other; both may live
    loop: t.Loop = 0  # the newest step loop that the sender has come to


class Suspect(Message, frozen=True):
    """A member is lost. With `proof` the process of its rank `shard` is known to have ended, and `script` is how its
    script has, if that is known. Without proof the sender cannot reach that rank, and knows nothing else; `silent`: it
    hears nothing of it."""

    replica: t.ReplicaNumber
    incarnation: t.Name
    reason: t.Text
    proof: bool
    shard: t.Shard = 0
    silent: bool = False
    script: ScriptEnd | None = None


class Severed(Message, frozen=True):
    """A connection for data with rank `shard` of a member has ended in the view of `epoch`. That is no proof that
    either side is lost. The sender repeats it for as long as that view is in force."""

    replica: t.ReplicaNumber
    incarnation: t.Name
    epoch: t.Epoch
    reason: t.Text
    shard: t.Shard = 0


class Reachable(Message, frozen=True):
    """A member that was suspected without proof can be reached again."""

    replica: t.ReplicaNumber


class Stalled(Message, frozen=True):
    """A rank waits in an op, or for what `ftcomm.control.blame` numbers below 0. `waiting_on` are the replicas that
    have to move; it is empty if the rank does not wait. With `due` the rank has waited for longer than its deadline and
    says so unasked; without it the message answers `WhoWaits`. `lasted` is for how many seconds it has waited, also in
    earlier views."""

    shard: t.Shard
    epoch: t.Epoch
    op: t.OpNumber
    waiting_on: t.ReplicaNumbers
    due: bool
    lasted: t.Seconds = 0.0


class Promise(Message, frozen=True):
    """The answer to `Prepare`. With `ok` the sender is bound to the proposal. Otherwise it has passed the boundary and
    is now at `step`."""

    proposal: t.ProposalNumber
    ok: bool
    step: t.Step


class AtBoundary(Message, frozen=True):
    """A rank with a promise stands at its boundary and asks its leader what was decided. With `later` the boundary is
    in a later step loop than the one in which the joiners wait."""

    proposal: t.ProposalNumber
    later: bool = False


class Withdrawn(Message, frozen=True):
    """All leaders withdrew their promise together; the coordinator must give the proposal up."""

    proposal: t.ProposalNumber


class Installed(Message, frozen=True):
    """The view is in force at this rank, and the `report` says how long that took. From a leader it means all ranks of
    its replica, whose reports it makes one of."""

    epoch: t.Epoch
    report: Report | None = None


class Ready(Message, frozen=True):
    """The script of a joiner stands before its first op or step boundary, so the others may wait for it from now on.
    From a leader it means the scripts of all ranks of its replica. `loop` is the step loop that it stands in. If the
    job is in a later one, or comes to one before the replica is in, the answer is `Behind`. With 0 it never is."""

    loop: t.Loop = 0


class CaughtUp(Message, frozen=True):
    """The rank holds the state of all members and can contribute. From a leader it means the whole replica."""

    step: t.Step


class Leave(Message, frozen=True):
    """This replica wants to leave at a step boundary. It is enough if one of its ranks says so."""


class Finished(Message, frozen=True):
    """The script has ended. With `ok` its training is done, and the replica needs nothing more. Otherwise the others
    count it as lost at once, and `reason` says why; `script` is how the script has ended, if it has."""

    ok: bool = True
    reason: t.Text = ""
    script: ScriptEnd | None = None


class Report(Message, frozen=True):
    """A line for the event log of the coordinator: `kind`, and fields that JSON can hold."""

    kind: t.Name
    fields: Annotated[dict[t.Name, t.Text | int | float | bool | None], Meta(max_length=256)]

    def __post_init__(self) -> None:
        if self.kind in RESERVED:
            raise ValueError(f"a report of the kind {self.kind!r}, which the coordinator itself uses; choose another")


# -- coordinator -> leader -> rank -------------------------------------------------------------------------------


class NewView(Message, frozen=True):
    """A new view. Without `view.step` it is in force at once. Otherwise it commits `view.proposal` and is in force from
    that boundary on."""

    view: View


class Carrier(enum.Enum):
    """The messages that carry a view."""

    NEW_VIEW = "NewView"
    REGISTERED = "Registered"
    DECISION = "Decision"


class Difference(Message, frozen=True):
    """A `carrier` on its way: the view in it, without what the one before on this connection had alike. `digest` is
    that of the view, by which the receiver proves what it makes of both (`ftcomm.control.view_differences`)."""

    carrier: Carrier
    digest: t.Digest
    epoch: t.Epoch
    step: t.Step | None
    proposal: t.ProposalNumber
    why: t.Text
    gone: t.ReplicaNumbers
    changed: Annotated[tuple[Member, ...], t.MANY]  # new lives, with addresses, and what changed of known ones
    loop: t.Loop = 0  # of `Registered`
    decides: t.ProposalNumber = 0  # the proposal of `Decision`


class Welcome(Message, frozen=True):
    """The leader's answer to `Hello`. It names the life of the replica that the rank belongs to, and the processes
    whose end the leader sees by itself (`Address.processes`)."""

    incarnation: t.Name
    processes: t.Name = ""


class RanksAt(Message, frozen=True):
    """The leader's answer to a rank that has asked where ranks of another group are reached; empty if the leader does
    not know them."""

    ranks: Addresses


class Queued(Message, frozen=True):
    """The coordinator knows the replica, which waits for its first view; `reason` says what it waits for."""

    reason: t.Text
    stage: Stage = Stage.WAITING


class Registered(Message, frozen=True):
    """The replica may prepare to join the running job. It is in no view, and no member waits for it, until all its
    ranks have said `Ready`. `view` is the newest view with this replica added, so that its script can be told who is
    there; `loop` is the step loop that the members are in."""

    view: View
    loop: t.Loop = 0


class Behind(Message, frozen=True):
    """The job has gone on to step loop `loop`, and takes in nobody who waits in an earlier one. The script goes on to
    that loop, and says `Ready` again; until then no member waits for it."""

    loop: t.Loop


class Dismissed(Message, frozen=True):
    """The replica is in no view and will get into none: it has asked to leave, or the job is being drained."""

    reason: t.Text


class Prepare(Message, frozen=True):
    """Asks the replica to stop at the boundary of `step` and hear there whether membership changes. It does not if that
    boundary is in a later step loop than `loop`, in which joiners wait; 0: in any."""

    proposal: t.ProposalNumber
    epoch: t.Epoch  # the view that the change would replace
    step: t.Step
    loop: t.Loop = 0
    joins: Annotated[tuple[Member, ...], t.MANY] = ()  # for the leader, who may hear of the commit from another one


class Cancel(Message, frozen=True):
    proposal: t.ProposalNumber


class WhoWaits(Message, frozen=True):
    """Asks every rank on whom it waits, after one of them has reported a stall."""


class Decision(Message, frozen=True):
    """The leader's decision, told to its ranks at the boundary: the view to install, or None to go on as before."""

    proposal: t.ProposalNumber
    view: View | None


class Removed(Message, frozen=True):
    reason: t.Text
    ending: Ending = Ending.FAILED


class FinishAck(Message, frozen=True):
    pass


class Ping(Message, frozen=True):
    """Makes the kernel of the receiver acknowledge it (`ftcomm.control.liveness`). A leader also tells the ranks of its
    replica for how many seconds it has not heard the coordinator; 0: it hears it."""

    unheard: t.Seconds = 0.0


# -- leader <-> leader -------------------------------------------------------------------------------------------


class Boundary(Message, frozen=True):
    """Says what a leader knows of a proposal when it reaches the boundary: the committed view, without addresses, or
    None."""

    replica: t.ReplicaNumber
    epoch: t.Epoch
    proposal: t.ProposalNumber
    view: View | None


# -- leader <-> shard 0 of its replica, which has the links to the others ----------------------------------------------


class ForLeader(Message, frozen=True):
    """Asks shard 0 to hand `boundary` to the leader of `replica`. One that comes for its own leader it hands up as it
    is."""

    replica: t.ReplicaNumber
    boundary: Boundary


class Linked(Message, frozen=True):
    """Shard 0 has its link to `replica`, for the first time or again: what was said over an earlier one may be lost."""

    replica: t.ReplicaNumber


class BoundaryWaits(Message, frozen=True):
    """The leader waits, while ranks of its replica stand at a boundary: for the leaders of `replicas`, or for `ranks`
    of its own, of which it names some."""

    replicas: t.ReplicaNumbers = ()
    ranks: Annotated[tuple[t.Shard, ...], t.MANY] = ()


class CoordinatorAt(Message, frozen=True):
    """A coordinator that has replaced another one has called this rank: it is reached there."""

    host: t.Name
    port: t.PortNumber


class AllFinished(Message, frozen=True):
    """The scripts of all ranks of the replica have ended well. Shard 0 waits for that."""


# -- leader <-> host agent of its ranks on another host ---------------------------------------------------------------


class AgentHello(Message, frozen=True):
    """The first message of a host agent to the leader. It says where the agent is reached, and names the life of the
    replica, if the agent has been told one before. `opening` counts its connections."""

    address: Address
    life: t.Name = ""
    opening: t.Count = 1


class RankLost(Message, frozen=True):
    """A host agent tells the leader that the process at `address`, of rank `shard`, has ended (`proof`), or that
    something refuses connections to it."""

    shard: t.Shard
    address: Address
    reason: t.Text
    proof: bool


class LeaderLost(Message, frozen=True):
    """A host agent tells a rank that it does not reach the leader; `refused` and `here` are as of a rank's own
    connection (`RankNode.up_lost`). What the rank says meanwhile goes nowhere. When the leader is reached again, the
    agent ends the connection, and the rank makes it anew, as if it had lost the leader by itself. Meanwhile it is told
    again each beat that the kernel of the leader `answers`."""

    reason: t.Text
    refused: bool = False
    here: bool = False
    answers: bool = False


# -- member <-> member -------------------------------------------------------------------------------------------


class Final(msgspec.Struct, frozen=True):
    """Chunks that are FINAL with the same contributors. Bit i of `chunks` (little endian) is chunk i."""

    contributors: t.ReplicaNumbers
    chunks: t.Bitmap


class OpProgress(msgspec.Struct, frozen=True):
    number: t.OpNumber
    finals: Annotated[tuple[Final, ...], t.MANY]


class FailedOp(msgspec.Struct, frozen=True):
    number: t.OpNumber
    message: t.Text
    lost: bool = False  # a lost member had the only data; else the calls differ


class Roster(msgspec.Struct, frozen=True):
    """The members of a group in rank order, from the boundary of step `since` on, and those of them that contribute
    from there on."""

    since: t.Step
    members: t.ReplicaNumbers
    contributors: t.ReplicaNumbers


class Progress(msgspec.Struct, frozen=True):
    """Tells where a member stands when it has quiesced. Ops are numbered from 0 in their group and return in order."""

    returned: Annotated[int, Meta(ge=0, le=1 << 53)]  # ops that returned, with a result or an error
    ops: Annotated[tuple[OpProgress, ...], t.MANY]  # issued and not yet returned, in order
    failed: Annotated[tuple[FailedOp, ...], t.MANY] = ()  # with an error that every member must get
    fresh: bool = False  # a joiner that has run no op takes over the numbers of the others
    step: t.Step = -1  # the last boundary that the member has passed
    loop: t.Loop = 0  # its step loop at the boundary where the joiners of the view come in
    epoch: t.Epoch = 0  # the view that the member comes from
    rosters: Annotated[tuple[Roster, ...], t.MANY] = ()  # as the members agreed when it entered that view
    severed: t.ReplicaNumbers = ()  # its connections to these have ended, which they may not have noticed


class MemberProgress(Message, frozen=True):
    """`Progress` of `replica` for the view of `epoch`."""

    replica: t.ReplicaNumber
    incarnation: t.Name
    epoch: t.Epoch
    progress: Progress


class Alive(Message, frozen=True):
    """A sign of life. It takes the link that would carry the progress, since the network between two members may be cut
    in silence."""

    replica: t.ReplicaNumber
    incarnation: t.Name


class RemovedIn(Message, frozen=True):
    """The answer to `Alive` of a life that is in the view in force no more: that view, without addresses. The leader
    of that life, who would tell it, may be gone."""

    view: View


Carried = (
    Hello
    | Join
    | Heartbeat
    | Suspect
    | Severed
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
    | Difference
    | Welcome
    | RanksAt
    | Queued
    | Registered
    | Behind
    | Dismissed
    | Prepare
    | Cancel
    | WhoWaits
    | Decision
    | Removed
    | FinishAck
    | Ping
    | Boundary
    | ForLeader
    | Linked
    | BoundaryWaits
    | CoordinatorAt
    | AllFinished
    | AgentHello
    | RankLost
    | LeaderLost
    | MemberProgress
    | Alive
    | RemovedIn
)


class Enclosed(Message, frozen=True):
    """`message` between a leader and a host agent: to each rank of `shards`, or said by each of them. From an agent
    without any, it is a sign of life of the agent itself."""

    shards: Annotated[tuple[t.Shard, ...], t.MANY]
    message: Carried


AnyMessage = Carried | Enclosed

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def encode_enclosed(shards: tuple[int, ...], message: bytes) -> bytes:
    """Encodes an `Enclosed` message that has been encoded already, maybe for several agents."""
    return _encoder.encode(("Enclosed", shards, msgspec.Raw(message)))


def decode(data: bytes) -> AnyMessage:
    """Decodes a message. Raises only `msgspec.DecodeError`, also for numbers out of bounds."""
    message: AnyMessage = decode_with(_decoder, data)
    return message
