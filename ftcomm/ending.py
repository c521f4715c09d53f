"""A training that was given up is not a training that is done: this tells how the script of this process ends.

`raise SystemExit(3)` leaves no trace that Python shows before the process has ended: such a script says that it has
finished. Under `ftcomm run` the launcher sees its exit code and corrects that at once (`Coordinator.exited`); elsewhere
a script that gives up has to call `sys.exit`.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from ftcomm.errors import TooLateError

_status: object = None  # that the main thread has called sys.exit, exit or quit with, since the last step boundary


def watch() -> None:
    """From now on `failure` knows the status of `sys.exit`, `exit` and `quit`, of which Python tells nobody else, and a
    script that ends by a `TooLateError` says so in one line. Idempotent."""
    if hasattr(sys.exit, "of_ftcomm"):
        return
    sys.exit = _noted(sys.exit)
    for name in ("exit", "quit"):  # of `site`, which python -S leaves out
        if hasattr(builtins, name):
            setattr(builtins, name, _noted(getattr(builtins, name)))
    sys.excepthook = functools.partial(_say, sys.excepthook)


def _noted(leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """`leave` as before, but the status that the main thread gives it is known to `failure`."""

    def exit_with(*args: Any, **named: Any) -> NoReturn:
        global _status
        if threading.current_thread() is threading.main_thread():
            _status = next(iter((*args, *named.values())), None)  # `exit` and `quit` take it as code=
        leave(*args, **named)

    functools.update_wrapper(exit_with, leave)
    exit_with.of_ftcomm = True  # type: ignore[attr-defined]
    return exit_with


def _say(
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Who comes when the job is over has made no mistake that a traceback could show."""
    if isinstance(error, TooLateError):
        print(f"ftcomm: {error}", file=sys.stderr)
    else:
        before(kind, error, trace)


def goes_on() -> None:
    """The script takes another step: an exit that it has asked for was caught."""
    global _status
    _status = None


def failure() -> str:
    """Why the script, which is ending now, has not ended well; empty if it has, as far as this can be known."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        return f"its script failed with {type(error).__name__}"
    if _status is None or _status == 0:
        return ""
    return f"its script exited with code {_status if isinstance(_status, int) else 1}"
