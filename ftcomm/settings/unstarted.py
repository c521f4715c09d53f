"""A process that cannot start tells its job why, so that no other one waits for it (`ftcomm.control.unstarted`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from ftcomm.control import wire
from ftcomm.control.handshake import LONGEST_FIELD, Fields
from ftcomm.control.rank_name import rank_name
from ftcomm.control.unstarted import UNSTARTED, NamedRank
from ftcomm.errors import FtcommError, SettingsError
from ftcomm.settings import Settings, credentials, split_endpoint

TELL = 2.0  # s that the end of the process waits for a coordinator to take the reason


def tell(why: Exception, settings: Settings | None, env: Mapping[str, str] | None = None) -> None:
    """Tell the coordinator, if one can be reached by the settings, or by what of the environment makes sense."""
    env = os.environ if env is None else env
    with contextlib.suppress(OSError, ValueError, KeyError, FtcommError):
        if settings is not None:
            endpoint, mine = settings.coordinator, credentials.of(settings)
            replica, shard = settings.replica, settings.shard
            leader = settings.leader if settings.ranks_per_replica > 1 else ""
        else:
            endpoint, mine = env["FTCOMM_COORDINATOR"], credentials.from_env(env["FTCOMM_TOKEN"], env)
            replica, shard = int(env["FTCOMM_REPLICA"]), int(env.get("FTCOMM_SHARD") or 0)
            leader = env.get("FTCOMM_LEADER", "")
        rank = NamedRank.of(replica, shard, split_endpoint(leader, "FTCOMM_LEADER") if leader else None)
        coordinator = split_endpoint(endpoint, "FTCOMM_COORDINATOR")
        reason = f"{rank_name(replica, shard)} cannot start: {why}"
        reason = reason[: LONGEST_FIELD - len(rank.leader)]  # an opening has no room for more
        # What is set stays as wrong when the process is started again; anything else may be mended by that.
        fields: Fields = {**rank.fields, "reason": reason, "lasting": int(isinstance(why, SettingsError))}
        with contextlib.closing(wire.connect(coordinator, mine, UNSTARTED, fields, TELL)) as channel:
            channel.settimeout(TELL)
            channel.recv(1)  # nothing: the coordinator hangs up when it has taken the reason
