"""All errors of ftcomm. Each message says what was expected, what was got, and what to do."""

from __future__ import annotations

import copy
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def copy_of(error: E) -> E:
    """Returns a copy of an error, to be raised in one place of several. An error that was raised keeps alive all that
    ran there, and so maybe itself and the memory of its group."""
    try:
        made = copy.copy(error)
    except TypeError:  # its arguments are not those of its constructor
        return error
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made


class FtcommError(RuntimeError):
    """The base of all errors of ftcomm."""


class SettingsError(FtcommError):
    """The environment or the arguments of a command cannot work."""


class InitError(FtcommError):
    """The job could not be joined: coordinator not reachable, refused, or no view before the deadline."""


class ArgumentError(FtcommError, ValueError):
    """A call with an array, dtype or operation that a collective cannot take; raised before anything is exchanged."""


class MismatchError(FtcommError):
    """Members made different calls for the same op number; raised on all of them, with both calls."""


class DivergenceError(FtcommError):
    """Members hold different results, or different states, where the protocol makes them equal: silent corruption."""


class RemovedError(FtcommError):
    """The job went on without this replica; the message says why: an op waited for it for too long, its host was
    silent, or others could not reach it. Restart it to rejoin."""


class TooLateError(InitError, RemovedError):
    """This replica came, or came back, when the job was over: nothing is wrong, and there is nothing left to do. A
    script that does not catch it ends with one line instead of a traceback, and with exit code 1."""


class LostError(FtcommError):
    """A member was lost, with data or a part in the group that no other has; the same on all survivors."""


class CollectiveTimeout(FtcommError, TimeoutError):
    """An op, or a wait for one, did not end before its deadline."""


class TransportError(FtcommError):
    """A peer's memory cannot be reached, or there is not enough memory to stage in."""


class StateError(FtcommError):
    """The training state of a replica cannot be sent, received or loaded."""


class StepError(FtcommError):
    """A training step cannot be completed: all replicas have voted so, or waited too long for others."""
