"""A simulated job: the coordinator with its file of views, and a launcher that starts dead replicas again."""

from __future__ import annotations

import functools
from collections.abc import Set
from typing import TYPE_CHECKING, Any

from ftcomm.control import coordinator as c
from ftcomm.control import coordinator_actions as ca
from ftcomm.control import messages as m
from ftcomm.control.blame import Removal
from ftcomm.control.finishes import NO_FINISHES, Finishes
from ftcomm.control.host_agent import HostAgent
from ftcomm.control.probe_schedule import Probe, ProbeOutcome, ProbeReason
from ftcomm.control.timeouts import Timeouts
from ftcomm.control.view_differences import ViewsSent
from ftcomm.control.views import Address, View
from ftcomm.simulation.host_agent import SimulatedHostAgent
from ftcomm.simulation.leader import COORDINATOR, SimulatedLeader
from ftcomm.simulation.network import SimulatedConnection, SimulatedNetwork
from ftcomm.simulation.promises import Promises
from ftcomm.simulation.rank import SimulatedRank, described
from ftcomm.simulation.script import Script, Workload
from ftcomm.simulation.world import Process, World

if TYPE_CHECKING:
    from ftcomm.simulation.scenario import Scenario


_VERDICT = 8.0  # s in which a coordinator finds out that all processes have ended, also one that is yet to come


class SimulatedCoordinator(Process):
    """Drives the machine as `ftcomm.control.server` does. `crash_in`: so many actions after a view, or after what
    it writes down of who has finished, it dies."""

    def __init__(self, job: SimulatedJob, lifetime: int, known: list[View], finishes: Finishes) -> None:
        world = job.world
        super().__init__(world, f"coordinator.{lifetime}", job.scenario.coordinator_host)
        self._job = job
        self.crash_in = -1
        self._conns: dict[int, SimulatedConnection] = {}
        self._count = 0
        self.machine = job.machine(
            job.scenario.replicas,
            job.scenario.ranks,
            job.timeouts,
            known[-2:],
            self.clock(),
            lifetime,
            boot=f"boot{self.host}",
            finishes=finishes,
        )
        self._tick()

    def accepts(self, connection: SimulatedConnection, purpose: str, fields: object) -> bool:
        self._count += 1
        number = self._count
        self._conns[number] = connection
        connection.receive[1] = lambda message: self.do(self.machine.receive(number, message, self.clock()))
        connection.told = ViewsSent()
        connection.closed[1] = lambda reason: self._closed(number)
        return True

    def leaderless(self, replica: int, incarnation: str, reason: str) -> None:
        self.do(self.machine.leaderless(replica, incarnation, reason, self.clock()))

    def _acknowledges(self, number: int) -> None:
        link = self.machine.links.get(number)
        if link is not None and self.machine.known.job.counts(link.replica, link.incarnation):
            self._job.acknowledged(link.replica, link.incarnation)

    def _closed(self, number: int) -> None:
        self._conns.pop(number, None)
        self.do(self.machine.disconnected(number, self.clock()))

    def _tick(self) -> None:
        self.after(self._job.timeouts.beat, self._tick)
        for number, connection in self._conns.items():
            seconds = connection.unanswered(1)
            if seconds is not None:
                self.machine.acknowledged(number, self.clock() - seconds)
            connection.send(1, m.Ping())
        self.do(self.machine.tick(self.clock()))

    def _probed(self, probe: Probe, outcome: ProbeOutcome) -> None:
        self.do(self.machine.probed(probe, outcome, self.clock()))

    def do(self, actions: list[ca.CoordinatorAction]) -> None:
        crash = -1
        told = [action.fields for action in actions if isinstance(action, ca.Log)]
        stalls: set[Any] = {fields["replica"] for fields in told if fields.get("removal") == Removal.STALL.value}
        for action in actions:
            if crash == 0:
                self.say("dies in the middle of telling a view")
                self._job.kill_coordinator()
                return
            crash -= 1
            kind = type(action)
            if kind is ca.Send:
                connection = self._conns.get(action.conn)  # type: ignore[union-attr]
                message: m.Message = action.message  # type: ignore[union-attr]
                if type(message) is m.NewView:
                    self._job.promises.heard(message.view)
                elif type(message) is m.FinishAck:
                    self._acknowledges(action.conn)  # type: ignore[union-attr]
                if connection is not None:
                    self._job.network.check(message)
                    connection.send(1, message)
            elif kind is ca.Persist:
                view: View = action.view  # type: ignore[union-attr]
                self.say("decides %s", described(view))
                self._job.store(view, stalls)
                if self.crash_in >= 0:
                    crash = self.crash_in
            elif kind is ca.StoreFinishes:
                self._job.store_finishes(action.finishes)  # type: ignore[union-attr]
                if self.crash_in >= 0:
                    crash = self.crash_in
            elif kind is ca.Close:
                connection = self._conns.pop(action.conn, None)  # type: ignore[union-attr]
                if connection is not None:
                    connection.close(1)
            elif kind is Probe:
                port = action.address.pid  # type: ignore[union-attr]
                asks = action.why in (ProbeReason.ACCUSED, ProbeReason.SEVERED)  # type: ignore[union-attr]
                self._job.network.probe(self, port, functools.partial(self._probed, action), awaits_mute=asks)  # type: ignore[arg-type]
            elif kind is ca.Unfit:
                self.say("decides nothing more: %s", action.reason)  # type: ignore[union-attr]
                self._job.ends_badly(action.reason)  # type: ignore[union-attr]
                self._job.kill_coordinator()
                self._job.unfit = True
                return
            elif kind is ca.Done:
                self._job.done(action.failed)  # type: ignore[union-attr]


class Replica:
    """A replica: its present life."""

    def __init__(self, number: int, hosts: tuple[int, ...]) -> None:
        self.number, self.hosts = number, hosts
        self.ranks: list[SimulatedRank] = []
        self.leader: SimulatedLeader | None = None  # a process of its own, if there are several ranks
        self.agent: SimulatedHostAgent | None = None  # of the host of all ranks but the first
        self.scripts: list[Script] = []
        self.running = False
        self.over = False
        self.lives = 0
        self.codes: list[int] = []


def _has_lost_its_leader(replica: Replica) -> bool:
    """Whether the leader or the agent of a replica has ended, so that it is about to end, too."""
    return any(process is not None and not process.alive for process in (replica.leader, replica.agent))


class SimulatedJob:
    machine: type[c.Coordinator] = c.Coordinator  # a test may put another in its place

    def __init__(self, scenario: Scenario, world: World, network: SimulatedNetwork, promises: Promises) -> None:
        self.scenario, self.world, self.network, self.promises = scenario, world, network, promises
        self.timeouts: Timeouts = scenario.timeouts
        self.work: Workload = scenario.work
        self.stored: list[View] = []  # all views that were ever decided
        self._finishes: list[tuple[int, Finishes]] = []  # what was written of who has finished, after so many views
        self.older = 0  # by so many views the store of this coordinator is older than the job
        self.draining = False
        self.ended: str | None = None  # "" if it ended well, else what the coordinator said
        self._gives_up = False  # the launcher does
        self._ports = 10
        self._lifetimes = 0
        self.coordinator: SimulatedCoordinator | None = None
        self.unfit = False  # the last coordinator has ended by itself, and the job has not
        self.replicas = [Replica(number, scenario.hosts[number]) for number in range(scenario.replicas)]

    def start(self) -> None:
        self.start_coordinator()
        for replica in self.replicas:
            self.world.after(0.001 * self.world.random.random(), None, self.start_replica, replica)

    # -- the coordinator ---------------------------------------------------------------------------------------------

    def start_coordinator(self, older: int = 0) -> None:
        """Start a coordinator with the store as it was `older` views ago."""
        if self.coordinator is None and self.ended is None:
            self._lifetimes += 1
            self.unfit = False
            self.older = min(older, len(self.stored))
            known = self.stored[: len(self.stored) - self.older]
            finishes = next((x for count, x in reversed(self._finishes) if count <= len(known)), NO_FINISHES)
            coordinator = self.coordinator = SimulatedCoordinator(self, self._lifetimes, known, finishes)
            self.network.listeners[COORDINATOR] = coordinator
            coordinator.say("starts with %s views of %s", len(known), len(self.stored))
            if self.draining:
                coordinator.do(coordinator.machine.drain())

    def kill_coordinator(self) -> None:
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            coordinator.say("dies")
            self.network.end(coordinator)

    def store(self, view: View, stalls: Set[int]) -> None:
        """Store a view in which the replicas `stalls` are not any more, since others wait for them."""
        self.stored.append(view)
        self.promises.persisted(view, stalls)

    def store_finishes(self, finishes: Finishes) -> None:
        self._finishes.append((len(self.stored), finishes))

    def acknowledged(self, replica: int, incarnation: str) -> None:
        """Note that a member is about to hear that its finish is known."""
        stored = self._finishes[-1][1] if self._finishes else NO_FINISHES
        self.promises.acknowledged((replica, incarnation), stored)

    def drain(self) -> None:
        if not self.draining:
            self.draining = True
            if self.coordinator is not None:
                self.coordinator.do(self.coordinator.machine.drain())

    def done(self, failed: str) -> None:
        if self.ended is None:
            self.world.say("coordinator", "says that the job is over: %s", failed or "finished")
            self.ended = failed
            holders = self.holders() if failed else self.holders(at_work=True)
            if failed:
                self.ends_badly(failed)
            self.promises.over(failed or "finished", holders)
            self.world.after(1.0, None, self.stop)

    def ends_badly(self, why: str) -> None:
        """Note what a coordinator says at its end, which with an older store cannot know what was stored since."""
        if not self.older:
            self.promises.ends_badly(why)

    def stop(self) -> None:
        self.world.over = True

    # -- replicas ----------------------------------------------------------------------------------------------------

    def holders(self, at_work: bool = False) -> list[str]:
        """Returns the lives that hold the state of the training: members of the newest view, and of the one before as
        long as no member runs in the newest. `at_work`: only those of the newest whose scripts have not come to their
        ends, since a member that leaves need not be waited for."""
        newest = self.stored[-1:]
        if newest and newest[0].proposal and not self.promises.entered(newest[0]) and not at_work:
            newest = self.stored[-2:]
        return [
            replica.ranks[0].incarnation
            for replica in self.replicas
            if replica.running
            and all(rank.alive and rank.holds_state and not rank.gone and not rank.left for rank in replica.ranks)
            and not (self.scenario.agents and _has_lost_its_leader(replica))
            and not (at_work and any(rank.finishing for rank in replica.ranks))
            and any(view.has(replica.number, replica.ranks[0].incarnation) for view in newest)
        ]

    @property
    def is_waiting_for_the_lost(self) -> bool:
        """No holder lives, which nobody can prove to the coordinator, and joiners wait for one, or for a coordinator if
        that has given up: a rank of the product's gives up after a time, and ends its replica. A replica whose ranks
        all have a view must not wait: that is a hang."""
        replicas = ([rank for rank in x.ranks if rank.alive and not rank.gone] for x in self.replicas)
        waiting = all(any(rank.node.view is None for rank in ranks) for ranks in replicas if ranks)
        alone = self.unfit if self.coordinator is None else self.coordinator.machine.alone
        return alone and not self.holders() and waiting

    def start_replica(self, replica: Replica) -> None:
        over = self.ended is not None or self._gives_up or (self.draining and replica.lives)
        if over or replica.over or replica.running:
            return
        replica.lives += 1
        replica.running = True
        scenario, world = self.scenario, self.world
        incarnation = f"{replica.number}{'abcdefghijklmnopqrstuvwxyz'[replica.lives % 26]}{replica.lives}"
        replica.codes = []
        replica.ranks = []
        replica.scripts = []
        ports = self._ports
        self._ports += scenario.ranks + (scenario.ranks > 1) + scenario.agents
        agent_port = ports + scenario.ranks + 1 if scenario.agents else None
        for index in range(scenario.ranks):
            rank = SimulatedRank(
                world,
                self.network,
                self.promises,
                replicas=scenario.replicas,
                replica=replica.number,
                index=index,
                ranks=scenario.ranks,
                host=replica.hosts[index],
                incarnation=incarnation,
                port=ports + index,
                leader_port=ports + scenario.ranks,
                agent_port=agent_port if index else None,
                timeouts=self.timeouts,
                burst=scenario.burst,
                pace=scenario.pace,
                on_exit=functools.partial(self._exits, replica),
            )
            if scenario.skew:
                rank.rate = 1.0 + scenario.skew * (2 * world.random.random() - 1)
                rank.offset = 1000 * world.random.random()
            rank.slow = scenario.slow.get(replica.number, 1.0)
            self.network.listeners[rank.port] = rank
            replica.ranks.append(rank)
        if scenario.ranks > 1:
            replica.leader = self._start_leader(replica.ranks[0], ports + scenario.ranks)
        if agent_port is not None:
            replica.agent = self._start_agent(replica, ports + scenario.ranks, agent_port)
        for rank in replica.ranks:
            script = Script(rank, self.work)
            replica.scripts.append(script)
            rank.start()
            rank.run(script.train())

    def _start_leader(self, rank: SimulatedRank, port: int) -> SimulatedLeader:
        assert rank.leader is not None
        leader = SimulatedLeader(
            *(self.world, self.network, rank.leader, rank.host, self.timeouts), on_end=self.network.end
        )
        leader.rate, leader.offset = rank.rate, rank.offset  # the same kernel's clock
        self.network.listeners[port] = leader
        leader.start()
        return leader

    def _start_agent(self, replica: Replica, leader_port: int, port: int) -> SimulatedHostAgent:
        first, ranks = replica.ranks[1], len(replica.ranks)
        address = Address(f"host{first.host}", port % 65536, f"boot{first.host}", port, 0, f"{port:032x}")
        node = HostAgent(range(1, ranks), ranks, self.timeouts, address, f"host{first.host}")
        name = f"{first.incarnation}/agent"
        agent = SimulatedHostAgent(
            *(self.world, self.network, node, name, first.host, leader_port, self.timeouts), on_end=self.network.end
        )
        agent.rate, agent.offset = first.rate, first.offset
        self.network.listeners[port] = agent
        agent.start()
        return agent

    def kill_agent(self, replica: Replica) -> None:
        """Kill the agent; its first rank sees that a moment later."""
        agent = replica.agent
        if agent is not None and agent.alive:
            agent.say("dies")
            self.network.end(agent)
            first = replica.ranks[1]
            pause = 0.0005 * (1 + self.world.random.random())
            self.world.after(pause, first, first.leader_ended, "its host agent has ended")

    def kill_leader(self, replica: Replica) -> None:
        """Kill the leader; its shard 0 sees that a moment later."""
        leader = replica.leader
        if leader is not None and leader.alive:
            leader.say("dies")
            self.network.end(leader)
            rank = replica.ranks[0]
            self.world.after(0.0005 * (1 + self.world.random.random()), rank, rank.leader_ended)

    def kill(self, replica: Replica, *, power: bool = False, first: int = 0, child: float = 0.0) -> None:
        """Rank `first`, and the launcher then ends the others. `child`: see `SimulatedNetwork.end`."""
        if replica.running:
            self._end_rank(replica, replica.ranks[first], power=power, child=child)
            self._died(replica)

    def lose_ports(self, replica: Replica) -> None:
        """End a replica for good; other programs have its ports from then on."""
        for process in (*replica.ranks, replica.leader, replica.agent):
            if process is not None and process.alive:
                process.say("dies, and another program listens at its port")
                self.network.end(process, port_taken=True)
        replica.running, replica.over = False, True
        self._look()

    def lose_host(self, replica: Replica, index: int) -> None:
        """Take the power from the host of one of its ranks. No launcher hears of it, so its ranks on others live on."""
        for rank in replica.ranks:
            if rank.host == replica.hosts[index]:
                self._end_rank(replica, rank, power=True)

    def end_alone(self, replica: Replica, rank: SimulatedRank) -> None:
        """Kill a rank of which no launcher hears, so the others of its replica live on."""
        self._end_rank(replica, rank)

    def _end_rank(
        self, replica: Replica, rank: SimulatedRank, *, power: bool = False, child: float = 0.0, well: bool = False
    ) -> None:
        if rank.alive:
            rank.say("dies%s", f", and its child lives for {child:g} s" if child else "")
            self.network.end(rank, power=power, child=child)
            if not power:
                for watcher in list(rank.watchers):
                    self.world.after(0.0005 * (1 + self.world.random.random()), watcher, watcher.saw_end, rank)
            leader = replica.leader if rank.index == 0 and rank is replica.ranks[0] else None
            if leader is not None and leader.alive and power:
                self.network.end(leader, power=True)
            elif leader is not None:
                self.world.after(0.0005 * (1 + self.world.random.random()), leader, leader.rank_0_ended, well)
            agent = replica.agent if rank in replica.ranks[1:2] else None
            if agent is not None and agent.alive and power:
                self.network.end(agent, power=True)
            elif agent is not None:
                self.world.after(0.0005 * (1 + self.world.random.random()), agent, agent.first_rank_ended, well)

    def _exits(self, replica: Replica, rank: SimulatedRank, code: int) -> None:
        rank.say("exits with %s", code)
        self._end_rank(replica, rank, well=not code)
        if rank not in replica.ranks or not replica.running:
            return
        replica.codes.append(code)
        if code:
            self._died(replica)
        elif len(replica.codes) == self.scenario.ranks:
            replica.running, replica.over = False, True
            self._look()

    def _died(self, replica: Replica) -> None:
        """The launcher sees it a moment later, ends the other ranks, and starts the replica again after its pause."""
        if not replica.running:
            return
        self.promises.failed(replica.ranks[0].incarnation)
        life = replica.lives

        def others() -> None:
            if replica.lives == life and replica.running:
                for rank in replica.ranks:
                    self._end_rank(replica, rank)
                if replica.leader is not None and replica.leader.alive:
                    self.network.end(replica.leader)
                if replica.agent is not None and replica.agent.alive:
                    self.network.end(replica.agent)
                replica.running = False
                for rank in replica.ranks:
                    rank.holds_state = False
                self._look()
                pause = self.scenario.restart_pause * (0.5 + self.world.random.random())
                self.world.after(pause, None, self._again, replica)

        self.world.after(0.002 * self.world.random.random(), None, others)

    def _again(self, replica: Replica) -> None:
        others = [other for other in self.replicas if other is not replica]
        if all(not other.running for other in others) and any(other.over for other in others):
            replica.over = True  # there is no replica to catch up from
            self._look()
        else:
            self.start_replica(replica)

    def _look(self) -> None:
        """Look whether anything is left to wait for."""
        running = any(replica.running for replica in self.replicas)
        if self.ended is None and not running and self.stored and not any(replica.over for replica in self.replicas):
            self._gives_up = True  # the state is lost: a launcher starts nobody any more
        if all(replica.over for replica in self.replicas) or (not running and (self.draining or self.stored)):
            self.world.after(0.0 if self.ended is not None else _VERDICT, None, self._end)

    def _end(self) -> None:
        """End the history: all processes have ended, and the coordinator has had the time to say how."""
        if any(replica.running for replica in self.replicas):
            return
        if self.ended is None and self._gives_up:
            self.ended = "all replicas died"
        self.world.over = True

    def describe(self) -> str:
        lines = []
        for replica in self.replicas:
            if replica.leader is not None:
                lines.append(f"{replica.leader.name}: alive={replica.leader.alive} frozen={replica.leader.frozen}")
            if replica.agent is not None:
                lines.append(f"{replica.agent.name}: alive={replica.agent.alive} frozen={replica.agent.frozen}")
            for rank in replica.ranks:
                node = rank.node
                stream, inflight = rank.exchange.core.stream, rank.exchange.inflight
                at = "" if stream is None else f"e{stream.view.epoch} {stream.pipeline.counts}"
                lines.append(
                    f"{rank.name}: alive={rank.alive} frozen={rank.frozen} {node.machine.phase.value} at boundary "
                    f"{node.machine.step}, {inflight.returned} ops returned, {len(inflight.ops)} in flight, "
                    f"stream {at}, script waits for {rank.awaits!r}, missing {node.machine.missing()} "
                    f"{node.waiting()}{', gone: ' + rank.gone if rank.gone else ''}"
                )
                for name, group in rank.groups.items():
                    lines.append(
                        f"  {name}: enters {group.membership.view and group.membership.view.epoch}, runs in "
                        f"{group.membership.epoch}, missing {group.membership.missing()}"
                    )
        if self.coordinator is None:
            lines.append("no coordinator")
        else:
            machine = self.coordinator.machine
            lines.append(
                f"coordinator: view {machine.view and described(machine.view)}, "
                f"installed {sorted(machine.job.installed)}, proposal {machine.proposal}, "
                f"waiting {sorted(machine.joiners.waiting)}, "
                f"preparing {sorted(machine.joiners.preparing)}, "
                f"links {sorted(link.replica for link in machine.links.values())}"
            )
        return "\n".join(lines)
