"""The actions that the coordinator asks for, in order; `ftcomm.control.server` carries it out."""

from __future__ import annotations

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.finishes import Finishes
from ftcomm.control.probe_schedule import Probe
from ftcomm.control.unstarted import Unstarted
from ftcomm.control.views import View

Conn = int  # a connection of a leader, numbered by the runtime


class Send(msgspec.Struct, frozen=True):
    conn: Conn
    message: m.Message


class Close(msgspec.Struct, frozen=True):
    conn: Conn


class Persist(msgspec.Struct, frozen=True):
    """The view must be on the disk before the actions after this one are carried out."""

    view: View


class Keep(msgspec.Struct, frozen=True):
    """Keep the reasons of ranks that cannot start, for a restarted coordinator."""

    reports: tuple[Unstarted, ...]


class StoreFinishes(msgspec.Struct, frozen=True):
    """Write down who has finished, in place of what was written before. It must be there before the `FinishAck` and the
    `Done` after this one are carried out: who is acknowledged may end, and this coordinator, too."""

    finishes: Finishes


class Log(msgspec.Struct, frozen=True):
    """An entry for the event log."""

    kind: str
    fields: dict[str, object]


class Done(msgspec.Struct, frozen=True):
    """The job has ended; `failed` says why if it did not end well."""

    failed: str = ""


class Unfit(msgspec.Struct, frozen=True):
    """This coordinator must not decide anything more in the job, which goes on, or has ended in an unknown way; says
    why."""

    reason: str


CoordinatorAction = Send | Close | Persist | Keep | StoreFinishes | Probe | Log | Done | Unfit
