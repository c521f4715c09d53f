"""Named points in the life of a rank, at which a test lets it die, or holds it while something else happens.

point       is just before                                                       of whom
connected   it says to the coordinator that it joins                             a joiner
known       it reads that the job knows it, and that its script may prepare      a joiner
ready       it says that its script is ready to be waited for                    a joiner
queued      it reads that it has to wait                                         a joiner
asked       it hears of a proposal                                               a member
standing    it tells its leader that it stands at the boundary of a proposal     a member
answered    it hears what another leader knows of a proposal                     a member
viewed      it hears of its first view                                           a joiner
changed     it hears of a further view                                           both
told        the others hear where it stands                                      both
reaching    it maps the memory of the others                                     both
entering    its exchange enters the view, as all have told where they stand      both
entered     it says that it runs in the view                                     both
op          it calls its next op                                                 both
posted      it says that a chunk of its input can be read                        both
taken       it says that it has all of a chunk                                   both
promised    it comes to a boundary that it has promised to stop at               a member
agreeing    it asks for the state                                                a joiner
fetching    it receives the first block of the state                             a joiner
loading     it loads the state                                                   a joiner
replaying   it repeats the steps that it has missed, if there are any            a joiner
caught_up   it says that it has the state of everybody                           a joiner
said        it goes on after it has said so; `asked` and the rest follow         a joiner
ending      it says that its script has ended                                    both

Of several ranks the leader is a process of its own, with which the watched rank 0 dies. Test and rank speak through
files in the folder of the job, so that it does not matter which of them dies: `do-R` says what replica R is to do at
which point, and is renamed to `at-R` by the one who is there; held is who sees `at-R`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from ftcomm.collective.publisher import Publisher
from ftcomm.control.control_thread import ControlThread
from ftcomm.control.rank_node import RankNode
from ftcomm.groups.data_plane import LocalDataPlane
from ftcomm.groups.group import Group
from ftcomm.groups.group_internals import Internals
from ftcomm.settings import Settings
from ftcomm.settings.engines import engine_kind
from ftcomm.training.catchup import Fetch
from ftcomm.training.replay import Replay
from ftcomm.transport.segment import POSTED, TAKEN

from . import kernel_stops, leader_points

JOINING = ("connected", "known", "ready", "queued", "viewed", "told", "reaching", "entering", "entered", "agreeing")
CHANGING = ("asked", "standing", "answered", "changed", "told", "entering", "entered")
CATCHING_UP = ("op", "taken", "fetching", "loading", "replaying", "caught_up", "said", *CHANGING[:4])


class Points:
    """The test's side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def die(self, replica: int, point: str) -> None:
        """Let the watched rank of `replica` kill itself when it comes to `point` next."""
        self._order(replica, f"die {point}")

    def hold(self, replica: int, point: str) -> None:
        """Let the watched rank of `replica` stand still when it comes to `point` next, until `release`."""
        self._order(replica, f"hold {point}")

    def _order(self, replica: int, text: str) -> None:
        (self._folder / f"at-{replica}").unlink(missing_ok=True)
        new = self._folder / f"new-{replica}"
        new.write_text(text)
        new.rename(self._folder / f"do-{replica}")

    def there(self, replica: int) -> bool:
        """Whether it has come to the point."""
        return (self._folder / f"at-{replica}").exists()

    def release(self, replica: int) -> None:
        """Let it go on; not there yet: it is not to stop at all."""
        for name in ("do", "at"):
            (self._folder / f"{name}-{replica}").unlink(missing_ok=True)


def watch_points(settings: Settings, arguments: dict[str, Any]) -> None:
    """The rank's side: called before it joins."""
    if settings.shard != arguments.get("watched", 0):
        return
    marks = Path(arguments["marks"])
    at = leader_points.at_points(marks, settings.replica, os.getpid())
    before = functools.partial(leader_points.before, at)
    if settings.ranks_per_replica == 1:
        leader_points.watch_leader(at)
    elif settings.shard == 0:
        leader_points.watch_own_leader(marks, settings.replica)
    else:
        before(RankNode, "from_up", lambda self, message: leader_points.heard(self.view, message))
    before(ControlThread, "enter", lambda self, *rest: None if self.view is not None else "ready")
    before(RankNode, "quiesced", "told")
    before(LocalDataPlane, "reach", "reaching")
    before(LocalDataPlane, "enter", "entering")
    before(RankNode, "entered", "entered")
    before(ControlThread, "finish", "ending")
    before(Group, "allreduce", "op")
    before(Group, "boundary", lambda self, step, *rest: "promised" if _has_promised(self, step) else None)
    words = {POSTED: "posted", TAKEN: "taken"}
    before(Publisher, "publish", lambda self, word, count, **more: words.get(word) if count else None)
    if engine_kind(settings.engine).runs_ops:
        kernel_stops.before_announce(at)
    before(Fetch, "_open", "agreeing")
    before(Fetch, "_receive", "fetching")
    before(Replay, "load", "loading")
    before(Replay, "apply", "replaying")
    before(Internals, "caught_up", "caught_up", after="said")


def _has_promised(group: Group, step: int) -> bool:
    promise = group._control_thread._node.machine._promise
    return promise is not None and promise.step <= step
