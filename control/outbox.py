"""Keeps what a rank tells its leader, or a leader the coordinator, and what has to arrive though the connection was
down. Pure."""

from __future__ import annotations

from collections import deque

from ftcomm.control import messages as m
from ftcomm.control.views import View

KEPT = 1000  # the newest reports that are kept


class Outbox:
    """Knows what is said again over a new connection, and what is said late. Not thread-safe."""

    def __init__(self) -> None:
        self._proofs: set[m.Suspect] = set()  # said again: nothing tells whether they have arrived
        self._reports: deque[m.Message] = deque(maxlen=KEPT)  # what no connection could take, and is not said again

    def says(self, message: m.Message, up: bool) -> bool:
        """Returns whether `message` is to be sent now, by a connection that is `up` or not. A report that is not is
        kept."""
        if isinstance(message, m.Suspect) and message.proof:
            self._proofs.add(message)
        if isinstance(message, m.Installed) and message.report is not None and not up:
            self._reports.append(message.report)  # that the view is installed is said again without it
        if isinstance(message, m.Report | m.Reachable) and not up:
            self._reports.append(message)
            return False
        return True

    def late(self, view: View | None) -> list[m.Message]:
        """Returns what is to be said over a new connection: proofs against members of `view`, and what was kept."""
        self.only(view)
        late: list[m.Message] = [*sorted(self._proofs, key=lambda x: x.replica), *self._reports]
        self._reports.clear()
        return late

    def only(self, view: View | None) -> None:
        """Forget the proofs against those that are not members of `view`."""
        self._proofs = {x for x in self._proofs if view is not None and view.has(x.replica, x.incarnation)}
