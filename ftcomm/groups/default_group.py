"""The default group: that of `ftcomm.init`, on which the functions of `ftcomm` call."""

from __future__ import annotations

import atexit
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from ftcomm.errors import FtcommError, InitError
from ftcomm.groups.calls import Calls, made_through
from ftcomm.groups.group import Group, log
from ftcomm.process import ending
from ftcomm.process.own import own_process
from ftcomm.settings import Settings, unstarted

_default: Group | None = None


def init(settings: Settings | None = None) -> Group:
    """Join the job that the environment names (see `ftcomm run`) and return the default group.

    Blocks until all replicas of a new job are here; or until a running job knows this replica (and has passed its first
    step boundary). In a running job no member waits for this replica before its own first boundary or op, so the script
    may take its time until then; see `Group.ready`. Call it once. Raises `SettingsError`, `InitError`,
    `TransportError`.
    """
    global _default
    own_process()
    if _default is not None:
        raise InitError("ftcomm.init() was called before in this process; use ftcomm.default_group()")
    try:
        settings = Settings.from_env() if settings is None else settings
        _configure_log()
        ending.watch()
        group = Group(settings)
    except FtcommError as error:
        unstarted.tell(error, settings)
        raise
    group.internals.join()
    _default = group
    atexit.register(_at_exit)
    return group


def default_group() -> Group:
    """Returns the group of `init`. Any thread. Raises `InitError` without one."""
    if _default is None:
        raise InitError("there is no group yet; call ftcomm.init() first")
    return _default


def existing_group() -> Group | None:
    """Returns the group of `init`, if there is one."""
    return _default


def _of_default_group(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a call of `Group` a function that takes the group as a keyword."""
    name = method.__name__

    def call(*args: Any, group: Calls | None = None, **kwargs: Any) -> Any:
        return getattr(default_group() if group is None else group, name)(*args, **kwargs)

    _, *parameters = inspect.signature(method).parameters.values()
    parameters.append(inspect.Parameter("group", inspect.Parameter.KEYWORD_ONLY, default=None))
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"`Group.{name}` on `group`, or on the default group.\n\n        {method.__doc__}"
    return call


allreduce = _of_default_group(Group.allreduce)
made_through(allreduce.__code__)  # all of them share it
allgather = _of_default_group(Group.allgather)
reduce_scatter = _of_default_group(Group.reduce_scatter)
alltoall = _of_default_group(Group.alltoall)
broadcast = _of_default_group(Group.broadcast)
reduce = _of_default_group(Group.reduce)
gather = _of_default_group(Group.gather)
scatter = _of_default_group(Group.scatter)
barrier = _of_default_group(Group.barrier)
send = _of_default_group(Group.send)
recv = _of_default_group(Group.recv)


def verify(state: Any, group: Group | None = None) -> str:
    """`Group.verify` on `group`, or on the default group."""
    return (default_group() if group is None else group).verify(state)


def report(**fields: str | int | float | bool | None) -> None:
    """`Group.report` on the default group. Raises `InitError` without a group."""
    default_group().report(**fields)


def shutdown() -> None:
    """Say that this rank's work is done, and leave. Called at exit if the script ended well; idempotent.

    Blocks until all ranks of the replica have said so, or one has died, and the coordinator has heard it; for at most
    30 seconds if the coordinator is away.
    """
    global _default
    group, _default = _default, None
    if group is not None:
        group.close(finished=True)


def _at_exit() -> None:
    """Leave at the exit of the script. One that ends by an error is not finished: its replica is lost, and
    restarted."""
    script = ending.failure()
    if script is None:
        shutdown()
    elif _default is not None:
        _default.internals.end_as(script)


def _configure_log() -> None:
    """Log to stderr if the program has set up no logging of its own."""
    level = os.environ.get("FTCOMM_LOG", "info").upper()
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s ftcomm %(levelname)s: %(message)s"))
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else "INFO")
