"""The witness that a rank calls, unless its leader sees it by itself."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Coroutine
from typing import Any

from ftcomm.control.handshake import Credentials
from ftcomm.control.liveness import processes
from ftcomm.control.rank_name import rank_name
from ftcomm.control.witness import Charge, Witness

log = logging.getLogger("ftcomm.control")


class OwnWitness:
    """The witness of this rank, if it has one. `spawn` runs a task in the event loop of the control thread."""

    def __init__(
        self,
        replica: int,
        shard: int,
        nonce: str,
        leader: tuple[str, int] | None,
        credentials: Credentials,
        call_timeout: float,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._replica, self._shard, self._nonce = replica, shard, nonce
        self._leader_address, self._credentials, self._call_timeout, self._spawn = (
            leader,
            credentials,
            call_timeout,
            spawn,
        )
        self.called: Witness | None = None

    def call(self, seen: str) -> None:
        """Start the witness, unless the leader sees this process by itself. `seen` are the processes that the leader
        sees."""
        if self.called is not None or seen == processes() or os.getpid() == 1:  # with process 1 its container ends
            return
        assert self._leader_address is not None
        token, job, tls = self._credentials.token, self._credentials.job, self._credentials.tls
        files = None if tls is None else tls.files
        nonce, call_timeout = self._nonce, self._call_timeout
        try:
            self.called = Witness(Charge(nonce, self._shard, self._leader_address, token, job, files, call_timeout))
        except OSError as error:
            self._unwitnessed(str(error))
        else:
            self._spawn(self._look_at(self.called))

    async def _look_at(self, witness: Witness) -> None:
        why = await witness.begun()
        if why:
            self._unwitnessed(why)

    def _unwitnessed(self, why: str) -> None:
        who = rank_name(self._replica, self._shard)
        log.warning("%s has no witness of its end, so its leader may hear of that late: %s", who, why)

    def dismiss(self) -> None:
        """Tell the witness that the rank ends as it should."""
        if self.called is not None:
            self.called.dismiss()
