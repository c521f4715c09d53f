"""A training that was given up is not a training that is done: this tells how the script of this process ends.

    it comes to its last line            its outermost frame has returned: well
    an exception ends it                 Python keeps that for debuggers: not well
    sys.exit, exit, quit                 by the status that these were given
    raise SystemExit                     Python keeps it for nobody, but flushes stdout and stderr while it is on its
                                         way out of a script: by the code of the one that is alive then
    the same under python -m or -c;      its outermost frame has not returned; with which code nobody can know. Well if
    a sys.exit imported before `init`    its last step loop has come to its end, else not
    (before Python 3.12)

So of the last kind two are told wrongly: a script that fails behind its whole training, and one that ends well without
a step loop, or by a `break` out of it. Under `ftcomm run` neither is: there all of that kind say that they have ended
well, and the launcher, which sees the code, corrects that at once (`Coordinator.exited`). Elsewhere `sys.exit(main())`
in place of `raise SystemExit(main())` is enough, or `ftcomm.shutdown()` where the work is done. `os._exit` says
nothing at all, whatever its code: that is a death.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ftcomm.control.script_end import ScriptEnd
from ftcomm.errors import TooLateError

_UNTOLD = object()
_status: object = _UNTOLD  # that the main thread exits with, if known; of an exit that was caught, until the next step
_complete = False  # the last step loop has come to its end
_outermost: FrameType | None = None  # of the main thread: the script


def watch() -> None:
    """Let `failure` know, from now on, the status of `sys.exit`, `exit`, `quit` and `raise SystemExit`, which Python
    does not tell otherwise. A script that ends by a `TooLateError` says so in one line. Idempotent."""
    global _outermost
    if hasattr(sys.exit, "of_ftcomm"):
        return
    _outermost = _bottom()
    sys.exit = _noted(sys.exit)
    for name in ("exit", "quit"):  # of `site`, which python -S leaves out
        if hasattr(builtins, name):
            setattr(builtins, name, _noted(getattr(builtins, name)))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, TypeError):  # a stream of the user's own may refuse, or be None
            stream.flush = _looking(stream)  # type: ignore[method-assign]
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


def _looking(stream: Any) -> Callable[[], None]:
    """`flush` of `stream` as before, but when the interpreter itself calls it, the script is over: then once it looks
    for the `SystemExit` that ended it. It does not keep the stream alive: Python writes what one that is dropped still
    holds as that goes, and what is part of a cycle at the end of the interpreter goes never."""
    there, flush = weakref.ref(stream), stream.flush
    if getattr(flush, "__self__", None) is stream:
        flush = None  # that of its class

    def look_and_flush() -> None:
        global _status
        stream: Any = there()
        if sys._getframe().f_back is None:
            with contextlib.suppress(AttributeError):
                del stream.flush
            codes = {repr(x.code): x.code for x in gc.get_objects() if issubclass(type(x), SystemExit)}
            if len(codes) == 1:  # else the script has kept one that it had caught
                [_status] = codes.values()
        if flush is not None:
            flush()
        elif stream is not None:
            type(stream).flush(stream)

    return look_and_flush


def _say(
    before: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Print an error of a script. One that comes when the job is over has made no mistake, so it gets no traceback."""
    if isinstance(error, TooLateError):
        print(f"ftcomm: {error}", file=sys.stderr)
    else:
        before(kind, error, trace)


def goes_on() -> None:
    """The script takes another step: an exit that it has asked for was caught."""
    global _status, _complete
    _status, _complete = _UNTOLD, False


def complete() -> None:
    """A step loop has come to its end."""
    global _complete
    _complete = True


def over() -> bool:
    """Whether the outermost frame of the script has ended. Then Python is on its way out."""
    return _outermost is not None and _bottom() is not _outermost


def failure() -> ScriptEnd | None:
    """Returns how the script, which is ending now, has ended; None if well, as far as this can be known."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        return ScriptEnd.by(type(error))
    code = 0 if _status is None else int(_status) if isinstance(_status, int) else 1  # as Python makes it
    if _outermost is None or not code or _last_instruction(_outermost).startswith("RETURN_"):
        return None
    if _status is not _UNTOLD:
        return ScriptEnd.with_code(code)
    if _complete or "FTCOMM_RUN" in os.environ or not over():
        return None
    return ScriptEnd.by(SystemExit)


def _last_instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _bottom() -> FrameType | None:
    """The outermost frame of the main thread as it is now."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame
