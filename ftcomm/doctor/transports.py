"""Says which transport FTCOMM_TRANSPORT=auto takes here, to ranks of this host and to others."""

from __future__ import annotations

import os

from ftcomm.doctor.check import Finding
from ftcomm.settings import TRANSPORTS
from ftcomm.sync.futex import TOTAL_STORE_ORDER
from ftcomm.transport.nixl import network as nixl_network


def chosen() -> list[Finding]:
    mode = os.environ.get("FTCOMM_TRANSPORT", "auto")
    if mode not in TRANSPORTS:
        return [Finding("transport", "wrong", f"FTCOMM_TRANSPORT={mode}", f"Set it to one of {', '.join(TRANSPORTS)}.")]
    beyond = "nixl" if nixl_network.rdma_available() else "tcp"
    if mode == "nixl" and not nixl_network.here().between_hosts:
        said = "FTCOMM_TRANSPORT=nixl, and there is no RDMA: only ranks of this host are reached"
        return [Finding("transport", "note", said, nixl_network.MEND)]
    if mode != "auto":
        return [
            Finding("transport", "ok", f"FTCOMM_TRANSPORT={mode}, to all; unset, it would be {beyond} to other hosts")
        ]
    within = "shm" if TOTAL_STORE_ORDER else f"{beyond}, as this processor does not keep the order of stores"
    return [Finding("transport", "ok", f"auto: {within} within a host, {beyond} to other hosts")]
