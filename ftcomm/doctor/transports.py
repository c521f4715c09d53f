"""Which transport FTCOMM_TRANSPORT=auto takes here, to ranks of this host and to others."""

from __future__ import annotations

import os

from ftcomm.doctor.check import Finding
from ftcomm.kernels.wait import ORDERED
from ftcomm.settings import TRANSPORTS
from ftcomm.transport import nixl


def chosen() -> list[Finding]:
    mode = os.environ.get("FTCOMM_TRANSPORT", "auto")
    if mode not in TRANSPORTS:
        return [Finding("transport", "wrong", f"FTCOMM_TRANSPORT={mode}", f"Set it to one of {', '.join(TRANSPORTS)}.")]
    beyond = "nixl" if nixl.pays() else "tcp"
    if mode != "auto":
        return [
            Finding("transport", "ok", f"FTCOMM_TRANSPORT={mode}, to all; unset, it would be {beyond} to other hosts")
        ]
    within = "shm" if ORDERED else f"{beyond}, as this processor does not keep the order of stores"
    return [Finding("transport", "ok", f"auto: {within} within a host, {beyond} to other hosts")]
