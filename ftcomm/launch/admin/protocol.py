"""What may be asked of a running job and what it answers: JSON lines on the unix socket in its run directory.

    -> {"ask":"status"}                 <- {"answer":"status", ...}
    -> {"ask":"restart_replica","replica":2}   <- {"answer":"done"}  or  {"answer":"refused","reason":"..."}
    -> {"ask":"events"}                 <- {"answer":"done"}, then {"answer":"happened","event":{...}} for each event

Who may open the socket may ask: the directory belongs to the user alone (mode 0700). Lines are bounded and typed, and a
line that is none of these is answered with the reason.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from ftcomm.control.decode import decode_with

SOCKET = "control"  # in the run directory
MAX_REQUEST = 4096  # bytes of a line
MAX_ANSWER = 1 << 20
MAX_AWAY = 60.0  # s that a coordinator may be kept away


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="ask"):
    """Base of all requests."""


class GetStatus(Request, frozen=True, tag="status"):
    pass


class GetEvents(Request, frozen=True, tag="events"):
    """Subscribes to every event from now on; the connection is for nothing else afterwards."""


class RestartCoordinator(Request, frozen=True, tag="restart_coordinator"):
    """Answered at once; the old one goes, and the new one comes `away` seconds later."""

    away: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_AWAY)] = 0.0


class RestartReplica(Request, frozen=True, tag="restart_replica"):
    """Answered when it is under way: the replica leaves at a step boundary, ends and is started again."""

    replica: Annotated[int, msgspec.Meta(ge=0)]


class Drain(Request, frozen=True, tag="drain"):
    """All replicas leave together and the job ends, as on a first Ctrl-C."""


class Answer(msgspec.Struct, frozen=True, tag_field="answer"):
    """Base of all answers."""


class Done(Answer, frozen=True, tag="done"):
    pass


class Refused(Answer, frozen=True, tag="refused"):
    reason: str


class Happened(Answer, frozen=True, tag="happened"):
    event: dict[str, Any]


class ReplicaStatus(msgspec.Struct, frozen=True):
    replica: int
    state: str  # of `policy.State`
    starts: int
    pids: dict[str, int]  # rank -> pid of those that live; keys of a JSON object are strings
    member: bool  # of the newest view
    contributes: bool
    step: int  # the last that is known; -1 if none
    host: str  # the address that its ranks listen on
    network: str = ""  # path of its network namespace, "" without one of its own
    effective: float | None = None  # effective training time ratio of its step loop; None if it has told none
    joining: str = ""  # of one that is no member yet: "prepares" while its script does, then "joins"
    reason: str = ""  # why it was removed or ended last, until it contributes again


class Status(Answer, frozen=True, tag="status"):
    run: str
    pid: int  # of the launcher
    script: str
    epoch: int  # of the newest view; 0 before the first
    draining: bool
    coordinator: str  # its endpoint
    away: bool  # the coordinator is being restarted
    ranks_per_replica: int
    transport: str
    heartbeat_timeout: float
    op_timeout: float
    replicas: list[ReplicaStatus]
    last: str = ""  # what the launcher said last
    network: str = ""  # path of the network namespace that joins those of the replicas


AnyRequest = GetStatus | GetEvents | RestartCoordinator | RestartReplica | Drain
AnyAnswer = Done | Refused | Happened | Status

_encoder = msgspec.json.Encoder(enc_hook=str)
_requests = msgspec.json.Decoder(AnyRequest)
_answers = msgspec.json.Decoder(AnyAnswer)


def encode(message: Request | Answer) -> bytes:
    """A line, with its end."""
    return _encoder.encode(message) + b"\n"


def decode_request(line: bytes) -> AnyRequest:
    """Raises `msgspec.DecodeError` (or its `ValidationError`), whose text says what is wrong."""
    request: AnyRequest = decode_with(_requests, line)
    return request


def decode_answer(line: bytes) -> AnyAnswer:
    """Raises `msgspec.DecodeError`."""
    answer: AnyAnswer = decode_with(_answers, line)
    return answer
