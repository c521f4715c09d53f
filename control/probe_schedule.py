"""Decides which process to probe when, and what follows from the outcome. Pure. `ftcomm.control.probe` lists the
outcomes.

    search     a member is not heard: probe the port of its leader again and again until it is heard
    accused    another process has proof that this one has ended. The proof holds, also without its sender, unless the
               accused answers
    severed    a connection for data with this process has ended: does it live?
    witness    another host refuses this process. Something in between, such as a firewall or a proxy that restarts,
               would refuse for all behind it: does any other host take a connection?
    again      another host does: is the first process still refused? Then it has ended, as far as can be known here

A refusal counts only for a port that has taken a connection from here before, or that refuses for as long as an op may
take: a firewall between two hosts that need each other would be noticed by then. A mute process counts as alive for the
same time.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from ftcomm.control.script_end import ScriptEnd
from ftcomm.control.views import Address, Life, Member

PAUSE = 1.0  # s between two probes of the same process; less in the beginning
WITNESSES = 4  # how many hosts are probed when another one refuses


class ProbeReason(enum.Enum):
    """The reason to probe a process; the list above says what each is for."""

    SEARCH = "search"
    ACCUSED = "accused"
    SEVERED = "severed"
    WITNESS = "witness"
    AGAIN = "again"


class ProbeOutcome(enum.Enum):
    """The outcome of a probe; `ftcomm.control.probe` says what each means."""

    ANSWERED = "answered"
    MUTE = "mute"
    ENDED = "ended"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


class Probe(msgspec.Struct, frozen=True):
    """Probe the process at `address`, and report the outcome by `probed`. It is about rank `shard` of that life.

    With `call`, if it answers and that replica is not connecting yet, tell it there where this coordinator is: it may
    still hold a connection to an earlier one. The rank at `also` is told so, too, and so its leader is, if the process
    at `address` holds its interpreter.
    """

    why: ProbeReason
    life: Life
    shard: int
    address: Address
    call: bool = False
    also: Address | None = None


class Conclusion(enum.Enum):
    NOTHING = "nothing"
    LIVES = "lives"
    REFUSED = "refused"  # and the refusal counts
    GONE = "gone"  # as far as can be known here, which is no proof
    ENDED = "ended"  # with a proof


class Accusation(NamedTuple):
    """A proof that a life has ended. With `own` it cannot go on, as itself or its launcher says; `script` is how its
    script has ended, if they know."""

    life: Life
    shard: int
    by: int
    why: str
    own: bool = False
    refuted: bool = False  # the accused has answered
    script: ScriptEnd | None = None


@dataclasses.dataclass
class _Search:
    begun: float
    last: float
    probing: bool = True
    mute: float | None = None  # since when the port has been mute
    refused: float | None = None  # since when it has refused without a break
    found: ProbeOutcome | None = None  # the last outcome


@dataclasses.dataclass
class _Refusal:
    address: Address
    last: float
    why: str


class Suspicions:
    """All processes in doubt. Not thread-safe. An op may take `op` seconds; a repeated report holds for `fresh`
    seconds."""

    def __init__(self, op: float, fresh: float) -> None:
        self._op, self._fresh = op, fresh
        self._searches: dict[Life, _Search] = {}
        self._took: set[Life] = set()  # their ports have taken a connection from here
        self._refusals: dict[tuple[Life, int], _Refusal] = {}
        self._accused: dict[tuple[Life, int], Accusation] = {}
        self._asked: dict[tuple[Life, int], float] = {}  # the accused that are being probed, and since when
        self._severed: set[tuple[Life, int]] = set()  # those being probed since a connection to them has ended

    # -- search ----------------------------------------------------------------------------------------------------

    def search(self, member: Member, away: bool, now: float) -> list[Probe]:
        """Returns the probe of a member that is not heard, if one is due. `away`: the member has no connection."""
        life = member.replica, member.incarnation
        search = self._searches.get(life)
        if search is None:
            search = self._searches[life] = _Search(now, now)
        elif search.probing or now - search.last < min(PAUSE, search.last - search.begun):
            return []
        search.last, search.probing = now, True
        call = away and now - search.begun >= PAUSE  # it will not connect by itself
        also = member.ranks[1] if call and len(member.ranks) > 1 else None
        return [Probe(ProbeReason.SEARCH, life, 0, member.ranks[0], call, also)]

    def heard(self, life: Life) -> None:
        """Note that a process speaks."""
        search = self._searches.get(life)
        if search is not None and not search.probing:
            del self._searches[life]
        self._refusals.pop((life, 0), None)

    def may_live(self, life: Life, now: float) -> bool:
        """Whether the port of a process leaves it possible that it lives: it answers, is mute for no longer than
        an op may take, or was not probed yet since it fell silent."""
        search = self._searches.get(life)
        if search is None or search.found is None or search.found is ProbeOutcome.ANSWERED:
            return True
        return search.found is ProbeOutcome.MUTE and now - (search.mute or now) <= self._op

    def took(self, life: Life) -> bool:
        """Whether the port of a process has taken a connection from here, so that a refusal counts."""
        return life in self._took

    # -- accusations -------------------------------------------------------------------------------------------------

    def accuse(self, accusation: Accusation) -> bool:
        """Whether the accusation is new. What a life says of itself counts more than what others say."""
        key = accusation.life, accusation.shard
        known = self._accused.get(key)
        if known is not None and known.own >= accusation.own:
            return False
        self._accused[key] = accusation
        return True

    def accusations(self) -> list[Accusation]:
        """The accusations whose accused is not being probed."""
        return [accusation for key, accusation in self._accused.items() if key not in self._asked]

    def asked(self, now: float) -> set[int]:
        """Returns the replicas of the accused that are being probed. No probe takes longer than an op."""
        return {life[0] for (life, _), since in self._asked.items() if now - since <= self._op}

    def ask(self, accusation: Accusation, address: Address, now: float) -> Probe:
        self._asked[accusation.life, accusation.shard] = now
        return Probe(ProbeReason.ACCUSED, accusation.life, accusation.shard, address)

    def drop(self, accusation: Accusation) -> None:
        self._accused.pop((accusation.life, accusation.shard), None)

    # -- connections for data ----------------------------------------------------------------------------------------

    def sever(self, life: Life, shard: int, address: Address) -> list[Probe]:
        """Note that another process has lost its connection to a rank; returns the probe of that rank."""
        if (life, shard) in self._severed:
            return []
        self._severed.add((life, shard))
        return [Probe(ProbeReason.SEVERED, life, shard, address)]

    # -- refusals ----------------------------------------------------------------------------------------------------

    def refused(
        self, life: Life, shard: int, address: Address, why: str, hosts: Iterable[Address], now: float
    ) -> list[Probe]:
        """Note that the host at `address` refuses a rank. `hosts` are ranks of other hosts, one each, to serve as
        witnesses."""
        self._refusals[life, shard] = _Refusal(address, now, why)
        return [Probe(ProbeReason.WITNESS, life, shard, there) for there in list(hosts)[:WITNESSES]]

    def why(self, probe: Probe) -> str:
        """Returns what is said of the process that a probe is about."""
        refusal = self._refusals.get((probe.life, probe.shard))
        return "its process has ended" if refusal is None else refusal.why

    def refusals(self, now: float) -> dict[Life, str]:
        """Returns the lives that a host refuses, and why each is said to be lost."""
        return {life: x.why for (life, _), x in self._refusals.items() if now - x.last <= self._fresh}

    # -- what is found -----------------------------------------------------------------------------------------------

    def probed(self, probe: Probe, outcome: ProbeOutcome, now: float) -> Conclusion | Accusation | Probe:
        """Returns what follows from the `outcome` of a probe: a conclusion, an accusation to decide on, or the next
        probe."""
        key = probe.life, probe.shard
        if probe.why is ProbeReason.SEARCH:
            return self._searched(probe.life, outcome, now)
        if probe.why is ProbeReason.ACCUSED:
            self._asked.pop(key, None)
            accusation = self._accused.get(key)
            refuted = outcome is ProbeOutcome.ANSWERED
            return Conclusion.NOTHING if accusation is None else accusation._replace(refuted=refuted)
        if probe.why is ProbeReason.SEVERED:
            self._severed.discard(key)
            return Conclusion.LIVES if outcome is ProbeOutcome.ANSWERED else Conclusion.NOTHING
        refusal = self._refusals.get(key)
        if refusal is None:
            return Conclusion.NOTHING
        if probe.why is ProbeReason.WITNESS:
            taken = outcome in (ProbeOutcome.ANSWERED, ProbeOutcome.MUTE)
            again = msgspec.structs.replace(probe, why=ProbeReason.AGAIN, address=refusal.address)
            return again if taken else Conclusion.NOTHING
        if outcome is ProbeOutcome.ENDED:
            return Conclusion.ENDED
        return Conclusion.GONE if outcome is ProbeOutcome.REFUSED else Conclusion.NOTHING

    def _searched(self, life: Life, outcome: ProbeOutcome, now: float) -> Conclusion:
        if outcome in (ProbeOutcome.ANSWERED, ProbeOutcome.MUTE):
            self._took.add(life)
        if outcome is not ProbeOutcome.REFUSED:
            self._refusals.pop((life, 0), None)
        search = self._searches.get(life)
        if search is None:
            return Conclusion.LIVES if outcome is ProbeOutcome.ANSWERED else Conclusion.NOTHING
        search.probing, search.found = False, outcome
        if outcome is not ProbeOutcome.REFUSED:
            search.refused = None
        if outcome is ProbeOutcome.ANSWERED:
            search.mute = None
            return Conclusion.LIVES
        if outcome is ProbeOutcome.MUTE:
            search.mute = now if search.mute is None else search.mute
            return Conclusion.LIVES if now - search.mute <= self._op else Conclusion.NOTHING
        if outcome is ProbeOutcome.REFUSED:
            search.refused = now if search.refused is None else search.refused
            means = life in self._took or now - search.refused >= self._op
            return Conclusion.REFUSED if means else Conclusion.NOTHING
        return Conclusion.ENDED if outcome is ProbeOutcome.ENDED else Conclusion.NOTHING

    # -- who is known ------------------------------------------------------------------------------------------------

    def forget(self, life: Life) -> None:
        self._searches.pop(life, None)
        self._took.discard(life)

    def keep(self, lives: set[Life]) -> None:
        """Forget all others."""
        self._searches = {life: search for life, search in self._searches.items() if life in lives}
        self._took &= lives
        self._refusals = {key: refusal for key, refusal in self._refusals.items() if key[0] in lives}
        self._accused = {key: accusation for key, accusation in self._accused.items() if key[0] in lives}
        self._asked = {key: since for key, since in self._asked.items() if key[0] in lives}
        self._severed = {key for key in self._severed if key[0] in lives}
