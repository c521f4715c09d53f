"""Decides what goes wrong in a history, and when: by chance, or as the kind of the history has it."""

from __future__ import annotations

import functools

from ftcomm.control import messages as m
from ftcomm.control.blame import SETTLED
from ftcomm.control.removals import LINGER
from ftcomm.control.timeouts import REPORT
from ftcomm.simulation.attacker import Attack
from ftcomm.simulation.job import Replica, SimulatedJob
from ftcomm.simulation.missed_boundary import MissedBoundary
from ftcomm.simulation.rank import SimulatedRank
from ftcomm.simulation.scenario import Scenario
from ftcomm.simulation.unsaid import Unsaid
from ftcomm.simulation.world import Process

_STORM = ("kill", "kill", "power", "freeze", "freeze", "partition", "one-way", "cut", "flap", "flap", "coordinator",
          "mid-decision", "leave", "lonely", "slow", "hold", "hold-all", "cut-off", "reset-all", "stop-coordinator",
          "together", "orphan", "sever")  # fmt: skip
_OF_KIND = {
    "kills": ("kill", "kill", "kill", "power", "flap"),
    "storm": _STORM,
    "partitions": ("partition", "one-way", "lonely", "flap", "cut"),
    "coordinator": ("coordinator", "mid-decision", "mid-decision", "kill", "cut"),
    "growth": ("kill", "kill", "kill", "brief", "brief", "late-news", "late-news", "leave", "flap", "coordinator"),
    "leaving": ("leave", "leave-unheard", "leave-unheard", "kill"),
    "cut-off": ("cut-off", "cut-off", "cut-off", "kill", "coordinator"),
    "resets": ("cut", "cut", "reset-all", "reset-all", "flap", "flap", "kill"),
    "held": ("hold", "hold", "hold-some", "hold-all", "stop-coordinator", "kill"),
    "rolled-back": ("roll-back", "roll-back", "kill", "coordinator"),
    "together": ("together", "together", "together", "kill", "flap"),
    "forks": ("orphan", "orphan", "hold", "coordinator"),
    "accused": ("accuse", "accuse", "accuse", "kill", "coordinator"),
    "rejected": ("reject", "reject", "reject", "kill", "coordinator"),
    "halves": ("half", "half", "half", "kill", "coordinator"),
    "squatted": ("squat", "squat", "kill", "coordinator", "flap"),
    "divided": ("divide", "divide", "divide", "kill", "coordinator", "cut"),
    "severed": ("sever", "sever", "sever", "sever", "kill", "coordinator", "hold"),
    "attacked": ("attack", "attack", "attack", "attack", "attack", "kill", "sever"),
}
_OF_KIND_WITH_AGENTS = {"resets": ("end-unheard", "end-unheard", "cut", "reset-all", "flap", "kill")}
_HEARD = 3.0  # s in which a leader hears that a rank has ended, when nothing is blocked or stopped


class Faults:
    """Schedules itself. After the storm all is mended but what is dead for good."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job, self.world, self.network = job, job.world, job.network
        self.random = self.world.random
        self.scenario: Scenario = job.scenario
        self.over = False
        scenario = self.scenario
        kinds = _OF_KIND.get(scenario.kind)
        if scenario.agents and scenario.kind in _OF_KIND_WITH_AGENTS:
            kinds = _OF_KIND_WITH_AGENTS[scenario.kind]
            self.world.after(0.02 * self.random.random(), None, self.strike, kinds[0])  # before there is a view
        if kinds:
            at = 0.0
            while (at := at + scenario.every * self.random.expovariate(1.0)) < scenario.storm:
                kind = self.random.choice(kinds)
                if self.random.random() < 0.5:
                    self.world.after(at, None, self._arm, kind)
                else:
                    self.world.after(at, None, self.strike, kind)
        elif scenario.kind != "calm":
            begin = scenario.storm * self.random.random()
            self.world.after(begin, None, getattr(self, f"_begin_{scenario.kind}"))
        for number, factor in scenario.slow.items():
            if 2 * factor * scenario.work.compute > scenario.timeouts.op_floor:
                self._touch(job.replicas[number], "slower than the deadline")
                job.promises.stalling.add(number)
        if scenario.wrong:
            replica = self.random.randrange(scenario.replicas)
            number = self.random.randrange(min(12, scenario.work.steps * len(scenario.work.counts)))
            job.promises.wrong.add((replica, number))
        self.end = scenario.storm + self._length()
        self.world.after(self.end, None, self.mend)

    def _length(self) -> float:
        """Returns how long a single fault of the histories of one fault lasts."""
        op = self.scenario.timeouts.op
        lengths = {
            "frozen": 6.0,
            "stuck": 40.0,
            "suspended": 3 * op,
            "ending": 12.0,
            "standing": 3 * op,
            "missed": 3 * op,
            "unsaid": 8 * op,
            "away": 4 * op,  # twice as long as ops wait
        }
        return lengths.get(self.scenario.kind, 0.0)

    # -- histories of one fault --------------------------------------------------------------------------------------

    def _begin_frozen(self) -> None:
        self._freeze(self.random.choice(self.job.replicas), 5.0)

    def _begin_stuck(self) -> None:
        replica = self.random.choice(self.job.replicas)
        if replica.running:
            self.excuse(replica, "its script stands still", stalls=True)
            self.random.choice(replica.scripts).stuck = True

    def _begin_standing(self) -> None:
        """Stop one, or its script, and kill others again and again. One is spared: it has waited all that time."""
        job = self.job
        running = [replica for replica in job.replicas if replica.running]
        view = job.stored[-1] if job.stored else None
        if view is None or len(view.contributing) < len(job.replicas) or len(running) < len(job.replicas):
            self.world.after(0.01, None, self._begin_standing)
            return
        stands, _, *others = self.random.sample(running, len(running))
        incarnation = stands.ranks[0].incarnation
        self.excuse(stands, "stands still", stalls=True)
        if self.random.random() < 0.3:
            self.random.choice(stands.scripts).stuck = True
        else:
            for rank in stands.ranks if self.random.random() < 0.5 else [self.random.choice(stands.ranks)]:
                rank.freeze()
        timeouts = self.scenario.timeouts
        removed_after = timeouts.op + timeouts.grace
        at = 0.0
        while (at := at + self.random.choice((0.3, 1.0, 3.0)) * (0.5 + self.random.random())) < removed_after:
            self.world.after(at, None, self._kill_if_running, self.random.choice(others))
        if self.random.random() < 0.4:  # the members tell it for how long they have waited
            self.world.after(0.8 * removed_after * self.random.random(), None, self.strike, "coordinator")
        # The last view before that is made, and in it all tell again for whom they wait.
        slack = SETTLED + 2 * REPORT + timeouts.heartbeat
        self.world.after(removed_after + slack, None, job.promises.stood_still, incarnation)

    def _kill_if_running(self, replica: Replica) -> None:
        if replica.running:
            self.kill(replica)

    def _begin_missed(self) -> None:
        MissedBoundary(self)

    def _begin_unsaid(self) -> None:
        Unsaid(self)

    def _begin_suspended(self) -> None:
        """Stop one after the other, so that most are stopped while they wait, and let them go on in another order."""
        if not all(replica.running for replica in self.job.replicas):  # one alone would be a stall
            self.world.after(0.001, None, self._begin_suspended)
            return
        seconds = self.scenario.timeouts.give_up + 1.0
        for rank in self.processes():
            self.world.after(0.5 * self.random.random(), None, rank.freeze)
            self.world.after(seconds + 1.5 * self.random.random(), None, self._thaw, rank)
        if self.random.random() < 0.5:
            self._stop_coordinator(seconds + 1.5 * self.random.random())

    def _begin_quiet(self) -> None:
        """Take the coordinator away as soon as there is a view that all have installed, until the training is
        through."""
        job = self.job
        machine = None if job.coordinator is None else job.coordinator.machine
        if machine is None or not machine.job.settled:
            self.world.after(0.001, None, self._begin_quiet)
            return
        job.kill_coordinator()
        self._watch_quiet()

    def _watch_quiet(self) -> None:
        """Start the coordinator when all stand behind their last step; `history.run` says so if they never do."""
        if self.job.promises.steps >= self.scenario.work.steps:
            self.world.after(0.01, None, self.job.start_coordinator)
        else:
            self.world.after(0.05, None, self._watch_quiet)

    def _begin_ending(self) -> None:
        """Stop and kill all others when one has come to its end, one after the other, and let the coordinator come and
        go meanwhile."""
        job = self.job
        if job.ended is not None:
            return
        through = [replica for replica in job.replicas if any(rank.finishing for rank in replica.ranks)]
        if not through:
            self.world.after(0.0002, None, self._begin_ending)
            return
        for replica in job.replicas:
            if replica.running and replica not in through:
                self.excuse(replica, "killed before its end")
                for rank in replica.ranks:
                    rank.freeze()
                self.world.after(5.0 * self.random.random(), None, job.kill, replica)
        for _ in range(self.random.choice((1, 1, 2))):
            dies = 5.0 * self.random.random()
            self.world.after(dies, None, job.kill_coordinator)
            self.world.after(dies + self.random.choice((0.01, 0.4, 3.0)), None, job.start_coordinator)

    def _begin_away(self) -> None:
        """Take the coordinator away until all is mended, stopped or dead, and kill a member meanwhile."""
        job = self.job
        machine = None if job.coordinator is None else job.coordinator.machine
        if machine is None or not machine.job.settled:
            self.world.after(0.001, None, self._begin_away)
            return
        if self.random.random() < 0.5:
            self._stop_coordinator(self.end)
        else:
            job.kill_coordinator()
        if self.random.random() < 0.5:
            self._arm("kill")
        else:
            pause = self.scenario.storm * self.random.random()
            self.world.after(pause, None, self.strike, "kill")

    def _begin_rolling(self, number: int = 0) -> None:
        """The next one only when all contribute again."""
        job = self.job
        if number >= len(job.replicas) or job.ended is not None:
            return
        view = job.stored[-1] if job.stored else None
        if view is not None and len(view.contributing) == len(job.replicas) and job.replicas[number].running:
            self.random.choice((self.kill, self.leave))(job.replicas[number])
            number += 1
        self.world.after(0.01, None, self._begin_rolling, number)

    def _arm(self, kind: str) -> None:
        """Let it happen in the middle of the next op."""
        self.world.armed.append(functools.partial(self.strike, kind))

    # -- faults by chance --------------------------------------------------------------------------------------------

    def strike(self, kind: str) -> None:
        running = [replica for replica in self.job.replicas if replica.running]
        if self.over or not running or self.job.ended is not None:
            return
        replica = self.random.choice(running)
        if kind in ("kill", "power"):
            others = [name for name in self.job.holders() if name != replica.ranks[0].incarnation]
            if not others and self.random.random() < 0.9:
                return  # seldom the end of the job
            if kind == "kill":
                self.kill(replica)
            else:
                self.excuse(replica, "no power")
                self.job.kill(replica, power=True, first=self.random.randrange(len(replica.ranks)))
        elif kind == "orphan":
            self.excuse(replica, "killed, with a child")
            child = self.random.choice((0.5, 3.0, 12.0))
            self.job.kill(replica, first=self.random.randrange(len(replica.ranks)), child=child)
        elif kind == "half" and self.job.stored:  # else the others wait for it to start, up to their init timeout
            self.excuse(replica, "a host of it has no power")
            self.job.lose_host(replica, self.random.randrange(len(replica.ranks)))
        elif kind == "squat" and self._has_begun:
            self.excuse(replica, "killed, and its port taken")
            self.job.lose_ports(replica)
        elif kind == "freeze":
            self._freeze(replica, self.random.choice((0.05, 0.5, 1.5, 5.0)))
        elif kind == "brief":  # no member may be removed for that
            self._freeze(replica, self._briefly())
        elif kind == "late-news":
            here, there = self.scenario.coordinator_host, replica.hosts[0]
            ways = self.random.choice(([(here, there)], [(there, here)], [(here, there), (there, here)]))
            self.block(ways, self._briefly())
        elif kind in ("hold", "hold-some", "hold-all"):
            self._hold(kind, running)
        elif kind == "cut-off":
            self._cut_off()
        elif kind == "reject":
            self._reject()
        elif kind == "divide":
            self._divide()
        elif kind == "slow":
            self.excuse(replica, "slow", stalls=True)
            for rank in replica.ranks:
                rank.slow = self.random.choice((10.0, 100.0))
        elif kind in ("partition", "one-way", "lonely"):
            self._partition(kind, replica)
        elif kind in ("cut", "reset-all"):
            for one in [replica] if kind == "cut" else running:
                self.world.say("chance", "breaks the connections upwards of replica %s", one.number)
                for rank in one.ranks if self.random.random() < 0.5 else one.ranks[:1]:
                    rank.break_up_link()
                if one.leader is not None:
                    one.leader.break_up_link()
                if one.agent is not None:
                    one.agent.break_up_link()
        elif kind == "end-unheard":
            self._end_unheard(running)
        elif kind == "flap":
            self._flap(replica)
        elif kind == "leave":
            self.leave(replica)
        elif kind == "leave-unheard":
            self._leave_unheard(replica)
        elif kind == "mid-decision" and self.job.coordinator is not None:
            self.job.coordinator.crash_in = self.random.randrange(4)
            self.world.after(0.3 * self.random.random(), None, self.job.kill_coordinator)
            self.world.after(0.3 + 0.3 * self.random.random(), None, self.job.start_coordinator)
        elif kind == "coordinator":
            self.job.kill_coordinator()
            self.world.after(self.random.choice((0.0, 0.01, 0.4)), None, self.job.start_coordinator)
        elif kind == "roll-back":
            self.job.kill_coordinator()
            older = self.random.choice((1, 1, 2, 5))
            self.world.after(self.random.choice((0.0, 0.01, 0.4)), None, self.job.start_coordinator, older)
            self.world.after(self.random.choice((0.5, 2.0, 6.0)), None, self._right_store)
        elif kind == "stop-coordinator":
            self._stop_coordinator(self.random.choice((0.5, 1.5, 6.0)))
        elif kind == "together":
            self._together(running)
        elif kind == "accuse":
            self._accuse(replica, running)
        elif kind == "sever":
            self._sever(replica)
        elif kind == "attack":
            self._attack(replica)

    @property
    def _has_begun(self) -> bool:
        """Whether a member that is neither heard nor proved dead is removed as a stall. Before that the others wait for
        all to join, and to make their first groups, up to their init timeout."""
        return bool(self.job.promises.returns or (self.job.stored and not self.scenario.work.groups))

    def _sever(self, replica: Replica) -> None:
        """Connections for data, of one rank or of all, to one replica or to several: at both ends, or at one."""
        others = [other for other in self.job.replicas if other is not replica]
        for other in self.random.sample(others, self.random.choice((1, 1, len(others)))):
            ends = self.random.choice(((0,), (1,), (0, 1)))
            self.world.say("chance", "resets the way from %s to %s, at %s", other.number, replica.number, ends)
            for rank in self.random.sample(replica.ranks, self.random.randint(1, len(replica.ranks))):
                rank.break_data(other.number, ends)

    def _attack(self, replica: Replica) -> None:
        """Do something to the next record on the way from another replica to a rank of this one."""
        other = self.random.choice(self.job.replicas)
        how = self.random.choice(list(Attack))
        rank = self.random.choice(replica.ranks)
        if other is not replica and rank.attack_data(other.number, how):
            self.world.say("chance", "%s: the next record from %s to %s", how.name, other.number, rank.name)
            if how.keeps_back:  # until another record comes, who waits for it waits, and is waited for
                for one in (replica, other):
                    if one.number not in self.job.promises.touched:
                        self._touch(one, "a record is kept back")
                        self.job.promises.stalling.add(one.number)

    def _end_unheard(self, running: list[Replica]) -> None:
        """Reset the connection of a host agent to its leader, and end a rank there at about that time. No launcher sees
        that; so while the replica joins, the leader hears it of the agent, or nobody does."""
        joining = [replica for replica in running if replica.ranks[0].node.view is None]
        replica = self.random.choice(joining or running)
        rank, agent, leader = self.random.choice(replica.ranks[1:]), replica.agent, replica.leader
        assert agent is not None
        assert leader is not None
        if rank.index not in leader.node.leader.addresses:  # it is waited for as if it had not started yet
            self.world.after(0.005, None, self.strike, "end-unheard")
            return

        def end() -> None:
            if rank.alive and not (rank.gone or rank.left or rank.finishing) and self.job.ended is None:
                self.excuse(replica, "a rank of it is killed")
                self.job.end_alone(replica, rank)
                self.world.after(_HEARD, None, self.job.promises.is_heard_of, rank, leader)

        for _ in range(self.random.choice((1, 1, 2))):
            self.world.after(0.03 * self.random.random(), None, agent.break_up_link)
        self.world.after(0.06 * self.random.random(), None, end)

    def _accuse(self, accused: Replica, running: list[Replica]) -> None:
        for by in running:
            rank = self.random.choice(by.ranks)
            view = rank.node.machine.view
            if by is not accused and view is not None and rank.alive and not rank.gone:
                rank.say("takes for proved that replica %s has ended", accused.number)
                rank.do(rank.node.peer_lost(accused.number, view.epoch, "its port is another one's", proof=True))

    def _right_store(self) -> None:
        """Somebody sees what was wrong."""
        if self.job.older:
            self.job.kill_coordinator()
        self.job.start_coordinator()

    def _together(self, running: list[Replica]) -> None:
        """Kill several at once, as the loss of a host does; one replica that holds the state is left."""
        holders = [replica for replica in running if replica.ranks[0].incarnation in self.job.holders()]
        kept = self.random.choice(holders) if holders else None
        others = [replica for replica in running if replica is not kept]
        self.job.kill_coordinator()
        for replica in self.random.sample(others, self.random.randint(min(1, len(others)), len(others))):
            self.kill(replica)
        self.world.after(self.random.choice((0.0, 0.01, 0.4)), None, self.job.start_coordinator)

    def _hold(self, kind: str, running: list[Replica]) -> None:
        """Hold interpreters: a process says nothing, and its kernel goes on."""
        count = {"hold": 1, "hold-some": self.random.randint(1, len(running)), "hold-all": len(running)}[kind]
        seconds = self.random.choice((0.5, 1.5, 3.0, 6.0))
        for replica in self.random.sample(running, count):
            self._freeze(replica, seconds)

    def _stop_coordinator(self, seconds: float) -> None:
        coordinator = self.job.coordinator
        if coordinator is not None:
            coordinator.say("is stopped for %s s", seconds)
            coordinator.freeze()
            self.world.after(seconds, None, coordinator.thaw)

    def _cut_off(self) -> None:
        """The coordinator, from everybody: both ways or one; and the ranks of its host with it."""
        here = self.scenario.coordinator_host
        there = [host for host in self._hosts() if host != here]
        out, back = [(here, host) for host in there], [(host, here) for host in there]
        self._part(self.random.choice((out, back, out + back)), self.random.choice((0.5, 3.0, 12.0)))

    def _divide(self) -> None:
        """The hosts of the first ranks from those of the second ones: both ways or one. All replicas alike, so no one
        of them is to go for it."""
        here, there = ({hosts[rank] for hosts in self.scenario.hosts} for rank in (0, 1))
        out = [(a, b) for a in sorted(here) for b in sorted(there)]
        back = [(b, a) for a, b in out]
        self.block(self.random.choice((out, back, out + back)), self.random.choice((0.5, 3.0, 12.0)))

    def _reject(self) -> None:
        """Let the coordinator's host refuse all, as a filter before it would, and reset what there is."""
        coordinator = self.job.coordinator
        if coordinator is not None:
            seconds = self.random.choice((0.01, 0.3, 3.0))
            self.world.say("chance", "resets and refuses the coordinator's connections for %s s", seconds)
            self.network.reject([self.scenario.coordinator_host], [*self.processes(), coordinator], seconds)

    def _everybody(self) -> list[SimulatedRank]:
        return [rank for other in self.job.replicas for rank in other.ranks if rank.alive]

    def processes(self) -> list[Process]:
        """Returns those of all replicas."""
        others = [process for other in self.job.replicas for process in (other.leader, other.agent)]
        return [*self._everybody(), *(process for process in others if process is not None and process.alive)]

    def _hosts(self) -> list[int]:
        """Returns the hosts of all ranks."""
        return sorted({host for hosts in self.scenario.hosts for host in hosts})

    def _briefly(self) -> float:
        """Some steps, but not so long that anybody may call it a loss."""
        return min(0.2, 20 * self.scenario.work.compute) * self.random.random()

    def kill(self, replica: Replica) -> None:
        self.excuse(replica, "killed")
        ranks = len(replica.ranks)
        first = self.random.randrange(ranks + (replica.leader is not None) + (replica.agent is not None))
        if first < ranks:
            self.job.kill(replica, first=first)
        elif first == ranks:
            self.job.kill_leader(replica)
        else:
            self.job.kill_agent(replica)

    def _freeze(self, replica: Replica, seconds: float) -> None:
        """SIGSTOP to one rank, or to all, the leader and the agent among them."""
        if not replica.ranks:
            return  # it has not started yet
        timeouts = self.scenario.timeouts
        if seconds > 0.8 * (timeouts.op_floor + timeouts.grace):
            self.excuse(replica, "stopped", stalls=True)
        others = [process for process in (replica.leader, replica.agent) if process is not None]
        ranks: list[Process] = [*replica.ranks, *others]
        ranks = ranks if self.random.random() < 0.5 else [self.random.choice(ranks)]
        for rank in ranks:
            rank.say("is stopped for %s s", seconds)
            rank.freeze()
            self.world.after(seconds, None, self._thaw, rank)

    def _thaw(self, rank) -> None:  # type: ignore[no-untyped-def]
        if rank.frozen:
            rank.say("goes on")
            rank.thaw()

    def _flap(self, replica: Replica) -> None:
        """Links between members break, and are made again."""
        other = self.random.choice(self.job.replicas)
        self.world.say("chance", "breaks the links of replica %s to replica %s", replica.number, other.number)
        for rank in replica.ranks:
            rank.break_links(other.number)

    def leave(self, replica: Replica) -> None:
        self.excuse(replica, "asked to leave")
        for rank in replica.ranks:
            known = rank.node.view is not None or rank.node.machine.preview is not None
            if rank.alive and not rank.gone and not rank.frozen and known:
                rank.do(rank.node.tell(m.Leave()))

    def _leave_unheard(self, replica: Replica) -> None:
        """Let it leave. What it says last, at the boundary, is lost on the way to one of the others, or to several."""
        others = [other.number for other in self.job.replicas if other is not replica]
        if others and replica.ranks:
            unheard = self.random.sample(others, self.random.randint(1, len(others)))
            replica.ranks[0].unheard_by = tuple(unheard)
            self._await_end(replica.ranks[0])
        self.leave(replica)

    def _await_end(self, leader: SimulatedRank) -> None:
        """Look for the end of a leader that leaves. It is known from then on, so nobody waits for it much longer."""
        if leader.alive:
            self.world.after(0.05, None, self._await_end, leader)
        elif leader.left:
            soon = LINGER + self.scenario.timeouts.heartbeat
            self.world.after(soon, None, self.job.promises.is_awaited_no_more, leader, self._everybody())

    def _partition(self, kind: str, replica: Replica) -> None:
        hosts = sorted({*self._hosts(), self.scenario.coordinator_host})
        if len(hosts) == 1:
            return
        if kind == "lonely":  # one pair of hosts
            here, there = self.random.sample(hosts, 2)
            side = [here]
            ways = [(here, there), (there, here)]
        else:
            side = self.random.sample(hosts, self.random.randint(1, len(hosts) - 1))
            rest = [host for host in hosts if host not in side]
            there = -1
            ways = [(a, b) for a in side for b in rest]
            if kind == "partition":
                ways += [(b, a) for a, b in ways]
            elif self.random.random() < 0.5:
                ways = [(b, a) for a, b in ways]
        seconds = self.random.choice((0.1, 1.5, 12.0))
        self._part(ways, seconds)

    def _part(self, ways: list[tuple[int, int]], seconds: float) -> None:
        """Block paths, some of which may lie between ranks: then one of their replicas has to go."""
        apart = {host for way in ways if set(way) <= set(self._hosts()) for host in way}
        for other in self.job.replicas:
            if apart & set(other.hosts):
                self._touch(other, "a blocked path")
        self.block(ways, seconds)

    def block(self, ways: list[tuple[int, int]], seconds: float) -> None:
        self.job.promises.blocked = True
        ways = [way for way in ways if way[0] != way[1]]
        self.world.say("chance", "blocks the paths %s for %s s", ways, seconds)
        number = self.network.partition(
            ways, [*self.processes(), *([self.job.coordinator] if self.job.coordinator else [])]
        )
        self.world.after(seconds, None, self._heal, number)

    def _heal(self, number: int) -> None:
        self.world.say("chance", "frees the paths of partition %s", number)
        self.network.heal(number)

    # -- the end -----------------------------------------------------------------------------------------------------

    def mend(self) -> None:
        if self.over:
            return
        self.over = True
        self.world.say("chance", "mends all")
        self.network.heal()
        for replica in self.job.replicas:
            for rank in replica.ranks:
                if self.scenario.kind != "frozen":
                    self._thaw(rank)
                rank.slow = min(rank.slow, 20.0)
            if replica.leader is not None and self.scenario.kind != "frozen":
                self._thaw(replica.leader)
            if replica.agent is not None and self.scenario.kind != "frozen":
                self._thaw(replica.agent)
            for script in replica.scripts:
                script.stuck, script.misses = False, None
        if self.scenario.kind != "quiet":
            if self.job.coordinator is not None:
                self.job.coordinator.thaw()
            self._right_store()
        if self.scenario.drains:
            self.job.drain()

    def _touch(self, replica: Replica, why: str) -> None:
        self.job.promises.touched.setdefault(replica.number, why)
        self.job.promises.stalling.discard(replica.number)
        self.world.say("chance", "replica %s: %s", replica.number, why)

    def excuse(self, replica: Replica, why: str, *, stalls: bool = False) -> None:
        """The present life of it may go; `stalls`: as a stall alone."""
        incarnation = replica.ranks[0].incarnation
        self.job.promises.excuse(incarnation, why, stalls=stalls)
        self.world.say("chance", "%s: %s", incarnation, why)
