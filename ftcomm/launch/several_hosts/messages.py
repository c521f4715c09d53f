"""The messages between the launchers of one job. That of host 0, beside which the coordinator runs, is in the middle.

host 0 to others: `BeginJob`, `TurnedAway`, `CoordinatorSaid`, what the coordinator says, and `Heard`
others to host 0: `RankFailed`, and `WhatWasHeard`, which `Heard` answers
both ways: `ReplicaIs`, `JobIsLost`
"""

from __future__ import annotations

from typing import Any

import msgspec

from ftcomm.control import field_types as t
from ftcomm.control.decode import decode_with, learn
from ftcomm.control.messages import Message
from ftcomm.control.script_end import ExitStatus, ScriptEnd
from ftcomm.launch.policy import State

LAUNCHER = "launcher"  # the purpose of their connections


class BeginJob(Message, frozen=True):
    """Tells that all hosts have come: start the replicas. `store`: torch's, host:port. `job`: its name, which host 0
    has made if none was given."""

    store: t.Name
    job: t.Name


class TurnedAway(Message, frozen=True):
    reason: t.Text


class ReplicaIs(Message, frozen=True):
    """A replica has come to a state, in its start number `starts`."""

    replica: t.ReplicaNumber
    state: State
    starts: t.Step


class JobIsLost(Message, frozen=True):
    reason: t.Text


class RankFailed(Message, frozen=True):
    """A rank of a replica has exited with `code`, which is that of an error."""

    replica: t.ReplicaNumber
    code: ExitStatus


class WhatWasHeard(Message, frozen=True):
    """Asks for `Heard`: of a replica that has ended, since what it said last may still be under way here; and of each
    one when there is a connection again, since what was said meanwhile did not come. `number`: of the question."""

    replica: t.ReplicaNumber
    number: t.ProposalNumber


class Heard(Message, frozen=True):
    """Says what the coordinator has heard of the present life of a replica, which is its start number `starts`.
    `number` is that of the question."""

    replica: t.ReplicaNumber
    number: t.ProposalNumber
    starts: t.Step
    joined: bool
    contributed: bool
    finished: bool
    trained: bool
    left: bool
    removed: t.Text  # why; "" if it was not


class CoordinatorSaid(Message, frozen=True):
    event: dict[t.Name, Any]

    def __post_init__(self) -> None:
        """Raise `ValueError` if the launcher could not act on it."""
        if not isinstance(self.event.get("kind"), str):
            raise ValueError("an event without a kind")
        if self.event["kind"] == "view":
            msgspec.convert(self.event, _View)
        elif self.event["kind"] == "metrics":
            msgspec.convert(self.event, _Metrics)
        elif self.event["kind"] == "suspect":
            ScriptEnd.of_event(self.event)


class _Member(msgspec.Struct, frozen=True):
    replica: t.ReplicaNumber
    contributing: bool


class _View(msgspec.Struct, frozen=True):
    epoch: t.Step
    step: t.Step | None
    members: list[_Member]
    why: str
    lost: list[t.ReplicaNumber] = []


class _Metrics(msgspec.Struct, frozen=True):
    effective: float


LauncherMessage = BeginJob | TurnedAway | ReplicaIs | JobIsLost | RankFailed | WhatWasHeard | Heard | CoordinatorSaid

_decoder = msgspec.msgpack.Decoder(LauncherMessage)
learn(_View, _Metrics)


def decode_launcher_message(data: bytes) -> LauncherMessage:
    """Raises only `msgspec.DecodeError`."""
    message: LauncherMessage = decode_with(_decoder, data)
    return message
