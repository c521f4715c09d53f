"""The requests to a running job, and their answers: JSON lines on the unix socket in its run directory.

    -> {"ask":"status"}                        <- {"answer":"status", ...}
    -> {"ask":"restart_replica","replica":2}   <- {"answer":"done"}  or  {"answer":"refused","reason":"..."}
    -> {"ask":"overview"}                      <- {"answer":"overview", "job":{...}}
    -> {"ask":"events"}                        <- {"answer":"done"}, then {"answer":"happened","event":{...}} lines

Whoever can open the socket may ask: the directory belongs to the user alone (mode 0700). Lines are bounded and typed,
and any other line is answered with the reason for its refusal.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ftcomm.control.decode import decode_with
from ftcomm.monitoring.job import Overview

SOCKET = "control"  # name in the run directory
MAX_REQUEST = 4096  # bytes of a line
MAX_ANSWER = 1 << 20
MAX_AWAY = 60.0  # s for which a coordinator may be kept away


class AdminRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="ask"):
    """The base of all requests."""


class GetStatus(AdminRequest, frozen=True, tag="status"):
    pass


class GetOverview(AdminRequest, frozen=True, tag="overview"):
    """Asks for the job as people look at it: curves, interruptions with their prices, what happened."""


class GetEvents(AdminRequest, frozen=True, tag="events"):
    """Subscribes to every event from now on; the connection serves nothing else afterwards."""


class RestartCoordinator(AdminRequest, frozen=True, tag="restart_coordinator"):
    """Restarts the coordinator. Answered at once; the old one goes, and the new one comes `away` seconds later."""

    away: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_AWAY)] = 0.0


class RestartReplica(AdminRequest, frozen=True, tag="restart_replica"):
    """Restarts a replica: it leaves at a step boundary, ends and is started again. Answered once that is under way."""

    replica: Annotated[int, msgspec.Meta(ge=0)]


class Resize(AdminRequest, frozen=True, tag="resize"):
    """Lets the lowest `replicas` train and the others leave at a step boundary. Answered once that is under way."""

    replicas: Annotated[int, msgspec.Meta(ge=1)]


class Drain(AdminRequest, frozen=True, tag="drain"):
    """Drains the job: all replicas leave together and the job ends, as on a first Ctrl-C."""


class AdminAnswer(msgspec.Struct, frozen=True, tag_field="answer"):
    """The base of all answers."""


class Acknowledged(AdminAnswer, frozen=True, tag="done"):
    pass


class Rejected(AdminAnswer, frozen=True, tag="refused"):
    reason: str


class Happened(AdminAnswer, frozen=True, tag="happened"):
    event: dict[str, Any]


class ReplicaStatus(msgspec.Struct, frozen=True):
    replica: int
    state: str  # a value of `policy.State`
    starts: int
    pids: dict[str, int]  # rank -> pid of living ranks; keys of a JSON object are strings
    member: bool  # whether it is in the newest view
    contributes: bool
    step: int  # the last known step; -1 if none
    host: str  # the address that its ranks listen on
    network: str = ""  # path of its own network namespace, or ""
    effective: float | None = None  # effective training time ratio of its step loop, if known
    joining: str = ""  # before it is a member: "prepares" while its script does, then "joins"
    reason: str = ""  # why it was last removed or ended, until it contributes again
    since: float = 0.0  # seconds since 1970 at which state, member, contributes or joining have changed last
    waits: dict[str, float] = {}  # rank -> seconds for which it has waited so far in its op; ranks of the asker's host


class Status(AdminAnswer, frozen=True, tag="status"):
    run: str
    pid: int  # the launcher's
    script: str
    epoch: int  # of the newest view; 0 before the first
    draining: bool
    coordinator: str  # endpoint of the coordinator
    away: bool  # the coordinator is being restarted
    ranks_per_replica: int
    transport: str
    heartbeat_timeout: float
    op_timeout: float
    replicas: list[ReplicaStatus]
    last: str = ""  # what the launcher said last
    network: str = ""  # path of the network namespace between those of the replicas
    op_timeout_floor: float = 0.0
    launched: bool = True  # whether who answers has started the ranks; else it does not know their processes


class OverviewAnswer(AdminAnswer, frozen=True, tag="overview"):
    job: Overview


AnyRequest = GetStatus | GetOverview | GetEvents | RestartCoordinator | RestartReplica | Resize | Drain
AnyAnswer = Acknowledged | Rejected | Happened | Status | OverviewAnswer

_encoder = msgspec.json.Encoder(enc_hook=str)
_requests = msgspec.json.Decoder(AnyRequest)
_answers = msgspec.json.Decoder(AnyAnswer)


def encode(message: AdminRequest | AdminAnswer) -> bytes:
    """Encodes a message as a line, with its end."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> AnyRequest:
    """Decodes a request. Raises `msgspec.DecodeError` (or its `ValidationError`), whose text says what is wrong."""
    request: AnyRequest = decode_with(_requests, line)
    return request


def decode_answer(line: bytes) -> AnyAnswer:
    """Decodes an answer. Raises `msgspec.DecodeError`."""
    answer: AnyAnswer = decode_with(_answers, line)
    return answer
