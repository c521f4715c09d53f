"""The agent of one host: it stands between the leader of a replica and the ranks of the replica on that host. Pure.

    leader     one connection, one handshake, one sign of life each way
    agent      hands what the leader says to its ranks on; merges what they say alike (`ftcomm.control.merged`)
    ranks      connect to the agent as they would to the leader

Each rank keeps the conversation with the leader that it would have without an agent, and either end says again what may
be lost with a connection. So the agent remembers nothing that counts:

    a rank's connection ends      the rank makes it again, and says hello; the leader repeats what that rank has to know
    the leader's connection ends  the ranks are told (`LeaderLost`). When it is there again, the agent ends theirs, so
                                  that each says hello anew, and what it has told the leader before
    the process of a rank ends    the kernel of the host tells the agent, which tells the leader
    the agent ends                and the replica with it: its ranks find that nobody listens on their own host

A rank that says nothing is mute to the leader as one without an agent. The kernel that answers for it is the agent's.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ftcomm.control import messages as m
from ftcomm.control.actions import ToLeader
from ftcomm.control.detector import Detector
from ftcomm.control.merged import Merge, Merged
from ftcomm.control.replica_reports import Losses
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.views import Address, View


class ToRanks(msgspec.Struct, frozen=True):
    """A message to each of some ranks."""

    shards: tuple[int, ...]
    message: m.Message


class EndConnections(msgspec.Struct, frozen=True):
    """End the connections of all ranks, which make them again."""


HostAgentAction = ToLeader | ToRanks | EndConnections

LEADER = "leader"  # the only peer that an agent watches


class HostAgent:
    """The state machine of the agent of `shards`. Not thread-safe. Times are seconds of any origin. Every method
    returns actions in order."""

    def __init__(self, shards: range, ranks: int, timeouts: Timeouts, address: Address, processes: str) -> None:
        """`ranks` are those of the replica; `processes` are those whose end the agent sees by itself."""
        self.shards = shards
        self.addresses: dict[int, Address] = {}  # the addresses of the ranks that have said hello
        self.life = ""  # the life of the replica, as the leader has told it
        self.address, self._processes = address, processes
        self._give_up = timeouts.give_up
        self._beats = timeouts.beats(ranks)
        self._beat = 0  # the next of `_beats`; with 0 the leader gets a sign of life
        self._above: Detector[str] = Detector(self._beats * timeouts.unheard)
        self._openings = 0  # connections to the leader so far
        # Why no rank may speak to the leader, in the message that tells each.
        self._lost: m.LeaderLost | m.Removed | m.Welcome | None = m.LeaderLost(
            "the leader of the replica has not been reached yet"
        )
        self._silent = False  # `_lost` says that the leader is silent; its connection stands
        self._answers = False  # since the last beat the kernel of a leader that is lost has answered
        self._ranks: set[int] = set()  # ranks that are connected, and have said hello
        self._welcome: set[int] = set()  # ranks of these that the leader has answered
        self._ended: dict[int, m.RankLost] = {}  # ranks whose process has ended; the leader may not have heard it
        self._forget()
        self._step, self._loop = -1, 0  # the newest step and loop of any rank
        self._view: View | None = None  # the newest view in which this replica runs

    def _forget(self) -> None:
        """Forget what was said over the last connection to the leader: the ranks say it again."""
        self._merged = Merged(len(self.shards))
        self._losses = Losses()
        self._spoke: set[int] = set()  # ranks that have given a sign of life since the last one to the leader

    # -- the leader ----------------------------------------------------------------------------------------------

    def opened(self, now: float) -> list[HostAgentAction]:
        """Note that the connection to the leader is there, for the first time or again."""
        self._above.heard(LEADER, now)
        self._openings += 1
        hello = ToLeader(m.AgentHello(self.address, self.life, self._openings))
        return [hello, *map(ToLeader, self._ended.values()), *self._begin_anew()]

    def _begin_anew(self) -> list[HostAgentAction]:
        self._lost, self._silent = None, False
        self._forget()
        self._ranks.clear()
        self._welcome.clear()
        return [EndConnections()]

    def lost(
        self, reason: str, refused: bool = False, here: bool = False, *, final: bool = False
    ) -> list[HostAgentAction]:
        """Note that there is no connection to the leader; the arguments are as of `RankNode.up_lost`. `final`: it
        refuses this agent, and would do so again, so no rank waits for it that has not been taken in before."""
        lost = m.Removed(reason) if final and not self.life else m.LeaderLost(reason, refused, here)
        self._silent = self._answers = False
        if lost == self._lost:
            return []
        self._lost = lost
        return self._to_ranks(sorted(self._ranks), lost)

    def acknowledged(self, at: float) -> list[HostAgentAction]:
        """Note that the kernel of the leader has answered."""
        self._above.acknowledged(LEADER, at)
        self._answers = self._lost is not None
        return []

    def from_leader(self, message: m.Message, now: float) -> list[HostAgentAction]:
        self._above.heard(LEADER, now)
        if not isinstance(message, m.Enclosed):
            return []
        inner = message.message
        if isinstance(inner, m.Welcome) and self.life not in ("", inner.incarnation):
            return self._belongs_to_an_earlier_life(inner)
        if isinstance(inner, m.Welcome):
            self.life = inner.incarnation
            self._welcome |= self._ranks & set(message.shards)
            inner = msgspec.structs.replace(inner, processes=self._processes)
        if isinstance(inner, m.NewView | m.Decision) and inner.view is not None:
            self._view = inner.view
        return self._to_ranks([shard for shard in message.shards if shard in self._welcome], inner)

    def _belongs_to_an_earlier_life(self, welcome: m.Welcome) -> list[HostAgentAction]:
        """Let the ranks read, now or with their next hello, that the leader is that of another life: they end."""
        self._lost = welcome
        return self._to_ranks(sorted(self._ranks), welcome)

    def _to_ranks(self, shards: Sequence[int], message: m.Message) -> list[HostAgentAction]:
        return [ToRanks(tuple(shards), message)] if shards else []

    # -- the ranks -----------------------------------------------------------------------------------------------

    def turned_away(self, message: m.Message) -> m.Message | None:
        """Returns the answer to the first message of a connection that takes the place of none, as `LeaderNode` does;
        None if it is that of a rank of this life. A rank knows the name of its life by its agent alone, so to one that
        knows none yet any name is that of another."""
        ours = isinstance(message, m.Hello) and message.incarnation in ("", self.life)
        return None if ours else m.Welcome(self.life, self._processes)

    def from_rank(self, shard: int, message: m.Message) -> list[HostAgentAction]:
        """Take a message that a rank has sent over its connection, of which the first is its hello."""
        if isinstance(message, m.Hello):
            self._ranks.add(shard)
            self._welcome.discard(shard)
            self.addresses[shard] = message.address
        elif shard not in self._ranks:
            return []  # its connection is about to end, and it says this again
        if self._lost is not None:
            return self._to_ranks([shard], self._lost) if isinstance(message, m.Hello) else []
        if isinstance(message, m.Heartbeat):
            return self._sign_of_life(shard, message)
        if isinstance(message, m.Suspect | m.Severed) and not self._losses.is_news(message):
            return []  # it is said with the next beat
        if isinstance(message, m.Reachable):
            self._losses.reached(message.replica, shard)
        return self._tell(self._merged.say(shard, message))

    def _sign_of_life(self, shard: int, message: m.Heartbeat) -> list[HostAgentAction]:
        news = self._step < 0 <= message.step or message.loop > self._loop or message.divided
        self._step, self._loop = max(self._step, message.step), max(self._loop, message.loop)
        if news:  # it may overtake what is held, as signs of life of different ranks may
            self._spoke.discard(shard)
            return [self._enclosed((shard,), message)]
        self._spoke.add(shard)
        return []

    def rank_closed(self, shard: int) -> list[HostAgentAction]:
        """Note that the connection of a rank has ended."""
        self._ranks.discard(shard)
        self._welcome.discard(shard)
        return []

    def rank_lost(self, shard: int, reason: str) -> list[HostAgentAction]:
        """Note that the process of a rank has ended."""
        if shard not in self.addresses:
            return []  # the leader has not heard of it either
        self._ended[shard] = m.RankLost(shard, self.addresses[shard], reason, True)
        return self._tell_lost(self._ended[shard])

    def rank_refused(self, shard: int, reason: str) -> list[HostAgentAction]:
        """Note that something refuses connections to a rank, which was connected: that is no proof."""
        return self._tell_lost(m.RankLost(shard, self.addresses[shard], reason, False))

    def _tell_lost(self, lost: m.RankLost) -> list[HostAgentAction]:
        """Say what this agent itself has found out, after all that the rank has said."""
        return [*self.flush(), ToLeader(lost)] if self._lost is None else []

    @property
    def holds(self) -> bool:
        """Whether something waits for `flush`, for which no rank may wait long."""
        return bool(self._merged)

    def flush(self) -> list[HostAgentAction]:
        """Tell the leader what some of the ranks have said, and others may say yet."""
        return self._tell(self._merged.flush())

    def _tell(self, said: Sequence[Merge]) -> list[HostAgentAction]:
        return [self._enclosed(shards, message) for shards, message in said]

    def _enclosed(self, shards: tuple[int, ...], message: m.Message) -> ToLeader:
        return ToLeader(m.Enclosed(shards, message))  # type: ignore[arg-type]

    # -- time ----------------------------------------------------------------------------------------------------

    @property
    def asks(self) -> bool:
        """Whether the leader gets a sign of life with the next `tick`."""
        return self._beat == 0

    def tick(self, now: float) -> list[HostAgentAction]:
        """Send a sign of life, and watch the leader. To be called every `Timeouts.beat`."""
        silent = self._above.silent(now).get(LEADER)
        actions: list[HostAgentAction] = []
        if silent is not None and self._lost is None:
            actions += self.lost(f"the leader of the replica is silent for {silent:.1f} s")
            self._silent = True
        elif silent is None and self._silent:
            actions += self._begin_anew()
        for loss in self._losses.tick(self._view) if self._lost is None else ():
            actions += self._tell(self._merged.say(loss.shard, loss))
        if self._answers and silent is None and isinstance(self._lost, m.LeaderLost) and not self._lost.refused:
            actions += self._to_ranks(sorted(self._ranks), msgspec.structs.replace(self._lost, answers=True))
        self._answers = False
        if self.asks:  # also to a leader that is not heard: its kernel may answer
            spoke, self._spoke = tuple(sorted(self._spoke)), set()
            actions += [*self.flush(), self._enclosed(spoke, m.Heartbeat(self._step, loop=self._loop))]
        self._beat = (self._beat + 1) % self._beats
        return actions
