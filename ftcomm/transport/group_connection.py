"""A connection between members of a communicator, and what it is for."""

from __future__ import annotations

from typing import NamedTuple

from ftcomm.control.sealed import Channel

LINK = "link"  # the first connection of a static group; it may come before the group
ASK = "ask"  # the first connection of a subgroup, which follows the views of a job
ENTERED = "entered"  # the same, from a member that runs in a view
EARLY = (LINK, ASK)
P2P = "p2p"  # send and recv


class GroupConnection(NamedTuple):
    """A connection for `what` from `member` of the group `group`. `instance` tells that group from earlier ones of its
    name. `epoch` is that of a group with several. `nonce` names the caller's segment, and `there` ours, if the caller
    knows it. `made` is the step boundary that was to come when the caller made its group. A group that was made before
    boundary `since` is not meant."""

    group: str
    what: str
    member: int
    instance: str
    sock: Channel
    epoch: int = 0
    nonce: str = ""
    there: str = ""
    made: int = 0
    since: int = 0
