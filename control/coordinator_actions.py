"""The actions that the coordinator asks for, in order; `ftcomm.control.server` carries it out."""

from __future__ import annotations

import dataclasses

from ftcomm.control import messages as m
from ftcomm.control.suspicion import Probe
from ftcomm.control.unstarted import Unstarted
from ftcomm.control.views import View

Conn = int  # a connection of a leader, numbered by the runtime


@dataclasses.dataclass(frozen=True)
class Send:
    conn: Conn
    message: m.Message


@dataclasses.dataclass(frozen=True)
class Close:
    conn: Conn


@dataclasses.dataclass(frozen=True)
class Persist:
    """The view must be on the disk before the actions after this one are carried out."""

    view: View


@dataclasses.dataclass(frozen=True)
class Keep:
    """Keep the reasons of ranks that cannot start, for a restarted coordinator."""

    reports: tuple[Unstarted, ...]


@dataclasses.dataclass(frozen=True)
class Log:
    """An entry for the event log."""

    kind: str
    fields: dict[str, object]


@dataclasses.dataclass(frozen=True)
class Done:
    """The job has ended; `failed` says why if it did not end well."""

    failed: str = ""


@dataclasses.dataclass(frozen=True)
class Unfit:
    """This coordinator must not decide anything more in the job, which goes on, or has ended in an unknown way; says
    why."""

    reason: str


Action = Send | Close | Persist | Keep | Probe | Log | Done | Unfit
