"""A process that cannot start tells its job why, so that nobody waits in vain: the other ranks of its replica end with
the reason, and the other replicas log for whom they wait."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from ftcomm.control import wire
from ftcomm.control.handshake import LONGEST_FIELD
from ftcomm.control.server import UNSTARTED
from ftcomm.errors import FtcommError
from ftcomm.settings import Settings, credentials, split_endpoint

TELL = 2.0  # s that the end of the process waits for a coordinator to take the reason


def tell(why: Exception, settings: Settings | None, env: Mapping[str, str] | None = None) -> None:
    """Tell the coordinator, if one can be reached by the settings, or by what of the environment makes sense."""
    env = os.environ if env is None else env
    with contextlib.suppress(OSError, ValueError, KeyError, FtcommError):
        if settings is not None:
            endpoint, mine = settings.coordinator, credentials.of(settings)
            replica, shard = settings.replica, settings.shard
        else:
            endpoint, mine = env["FTCOMM_COORDINATOR"], credentials.from_env(env["FTCOMM_TOKEN"], env)
            replica, shard = int(env["FTCOMM_REPLICA"]), int(env.get("FTCOMM_RANK") or 0)
        coordinator = split_endpoint(endpoint, "FTCOMM_COORDINATOR")
        reason = f"rank {shard} of replica {replica} cannot start: {why}"[:LONGEST_FIELD]
        wire.connect(coordinator, mine, UNSTARTED, {"replica": replica, "reason": reason}, TELL).close()
