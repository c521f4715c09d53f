"""Decides when host 0 of several is gone, from what comes of the attempts to reach its launcher. Pure.

refused   the kernel there answers that no process listens: that launcher has ended, and its coordinator with it. It may
          be a coordinator that is put back, or a filter on the way; so this counts after twice the op timeout, without
          any other answer, and if a rank has waited here for as long as an op may take, and no op has returned
          meanwhile: the training stands. Who only computes has all that it needs
others    a silence, a reset, a failed handshake: the network, or a host that is stopped or starts. No proof
"""

from __future__ import annotations

from collections.abc import Callable

from ftcomm.launch.policy import CHECKPOINT


class Refusals:
    """The attempts of one launcher. `stands()` says since when the training stands on this host (infinity: it does
    not); times are seconds of the monotonic clock."""

    def __init__(self, endpoint: str, op_timeout: float, stands: Callable[[], float]) -> None:
        self._endpoint, self._op_timeout, self._stands = endpoint, op_timeout, stands
        self._since: float | None = None  # it refuses

    def proof(self, error: Exception, now: float) -> str:
        """Note why there is no connection. Returns why the job is lost; "" if it may live."""
        if not isinstance(error, ConnectionRefusedError):
            self._since = None
            return ""
        self._since = now if self._since is None else self._since
        refused, op = now - self._since, self._op_timeout
        if refused < 2 * op or now - self._stands() < op:
            return ""
        return (
            f"host 0 at {self._endpoint} has refused connections for {refused:.0f} s (twice the op timeout), so its "
            f"launcher has ended, and the coordinator with it. {CHECKPOINT}: the same command on each host"
        )
