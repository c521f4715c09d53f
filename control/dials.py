"""A member that is not heard is looked for: when its port is dialled, and what a refusal proves. Pure.

The port where its leader listens is open as long as the process lives, whatever that does: the kernel takes connections
while the interpreter is held, or the process is stopped. So

    answered      it lives; it may be held up, or make its connection again in a moment
    ended         refused by our own kernel, so nobody listens there any more; or taken by a process of the job that
                  proves to be another one
    refused       by another host: it seems so if that port has taken a connection of ours before, or refuses for so
                  long that a firewall between two that need each other would have been noticed. It is no proof: what is
                  in between, a firewall or a proxy that restarts, says the same for all who are behind it
    unreachable   silence, which proves nothing
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Outcome = Literal["answered", "ended", "refused", "unreachable"]
Verdict = Literal["", "seems ended", "ended"]  # "": it lives, or nothing is known of it
Life = tuple[int, str]  # (replica, incarnation)

PAUSE = 1.0  # s between two dials of one that stays away; less in the beginning


@dataclasses.dataclass
class _Search:
    begun: float
    last: float
    dialling: bool = True
    refused: float | None = None  # since when, without anything else in between


class Dials:
    """Not thread-safe. A life is looked for from the first `due` on until it is `found`.

    `patience`: seconds for which a port that we do not know has to refuse us to prove anything.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._searches: dict[Life, _Search] = {}
        self._answered: set[Life] = set()

    def due(self, life: Life, now: float) -> bool:
        """Whether to dial it now; if so, call `judged` with the outcome."""
        search = self._searches.get(life)
        if search is None:
            self._searches[life] = _Search(now, now)
            return True
        if search.dialling or now - search.last < min(PAUSE, search.last - search.begun):
            return False
        search.last, search.dialling = now, True
        return True

    def long(self, life: Life) -> bool:
        """Whether it has been looked for so long that it will not come by itself."""
        search = self._searches.get(life)
        return search is not None and search.last - search.begun >= PAUSE

    def judged(self, life: Life, outcome: Outcome, now: float) -> Verdict:
        """What `outcome`, that of a dial, says of its process."""
        search = self._searches.get(life)
        if outcome == "answered":
            self._answered.add(life)
        if search is None:
            return ""
        search.dialling = False
        if outcome != "refused":
            search.refused = None
            return "ended" if outcome == "ended" else ""
        search.refused = now if search.refused is None else search.refused
        long = now - search.refused >= self._patience
        return "seems ended" if life in self._answered or long else ""

    def known(self, life: Life) -> bool:
        """Whether its port has answered us, so that a refusal means something."""
        return life in self._answered

    def found(self, life: Life) -> None:
        """The life is heard again."""
        search = self._searches.get(life)
        if search is not None and not search.dialling:
            del self._searches[life]

    @property
    def searched(self) -> set[Life]:
        return set(self._searches)

    def forget(self, life: Life) -> None:
        self._searches.pop(life, None)
        self._answered.discard(life)

    def keep(self, lives: set[Life]) -> None:
        """Forget all others."""
        self._searches = {life: search for life, search in self._searches.items() if life in lives}
        self._answered &= lives
