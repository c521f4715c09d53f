"""The witness that a rank calls, unless its leader sees it by itself."""

from __future__ import annotations

import logging
import os

from ftcomm.control.control_loop import ControlLoop
from ftcomm.control.handshake import Credentials
from ftcomm.control.liveness import processes
from ftcomm.control.rank_name import rank_name
from ftcomm.control.witness import Witness, WitnessConfig

log = logging.getLogger("ftcomm.control")


class OwnWitness:
    """The witness of this rank, if it has one; `nonce` is the one in the rank's address."""

    def __init__(
        self, control: ControlLoop, nonce: str, leader: tuple[str, int] | None, credentials: Credentials
    ) -> None:
        self._control, self._nonce, self._leader, self._credentials = control, nonce, leader, credentials
        self.called: Witness | None = None

    def call(self, seen: str) -> None:
        """Start the witness, unless the leader sees this process by itself. `seen` are the processes that the leader
        sees."""
        if self.called is not None or seen == processes() or os.getpid() == 1:  # with process 1 its container ends
            return
        assert self._leader is not None
        token, job, tls = self._credentials.token, self._credentials.job, self._credentials.tls
        files = None if tls is None else tls.files
        fields = self._nonce, self._control.node.shard, self._leader, token, job, files
        try:
            self.called = Witness(WitnessConfig(*fields, self._control.timeouts.give_up))
        except OSError as error:
            self._unwitnessed(str(error))
        else:
            self._control.spawn(self._look_at(self.called))

    async def _look_at(self, witness: Witness) -> None:
        why = await witness.begun()
        if why:
            self._unwitnessed(why)

    def _unwitnessed(self, why: str) -> None:
        who = rank_name(self._control.node.machine.replica, self._control.node.shard)
        log.warning("%s has no witness of its end, so its leader may hear of that late: %s", who, why)

    def dismiss(self) -> None:
        """Tell the witness that the rank ends as it should."""
        if self.called is not None:
            self.called.dismiss()
