"""The host's engine with the reducer of a device: plan, words, resume rules and accounts are those of `host`."""

from __future__ import annotations

import dataclasses

from ftcomm.engines.gpu_reduce.reducer import DeviceReducer, ReduceDevice
from ftcomm.engines.host import HostEngine
from ftcomm.settings import Settings
from ftcomm.transport.segment import HOST, Layout

# Staging as the host has it; members of one group reduce alike.
LAYOUTS: dict[str, Layout] = {
    engine: dataclasses.replace(HOST, magic=HOST.magic + 0x200 + kind, engine=engine)
    for kind, engine in enumerate(("interpreter-reduce", "gpu-reduce"))
}


def reduce_engine(settings: Settings, device: ReduceDevice) -> HostEngine:
    """Raises `TransportError` if the device cannot map the memory of this rank."""
    reducer = DeviceReducer(device)
    engine = HostEngine.of_job(settings, LAYOUTS[settings.engine], reducer)
    reducer.use([engine.segment.buffer])
    reducer.warm()
    return engine
