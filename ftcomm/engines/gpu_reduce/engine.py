"""The host's engine with the reducer of a device: plan, words, resume rules and accounts are those of `host`."""

from __future__ import annotations

import dataclasses

from ftcomm.engines.gpu_reduce.reducer import DeviceReducer, Place
from ftcomm.engines.host import HostEngine
from ftcomm.settings import Settings
from ftcomm.transport.segment import HOST, Layout

# Staging as the host has it; members of one group reduce alike.
LAYOUTS: dict[str, Layout] = {
    engine: dataclasses.replace(HOST, magic=HOST.magic + 0x200 + kind, engine=engine)
    for kind, engine in enumerate(("interpreter-reduce", "gpu-reduce"))
}


class ReduceEngine(HostEngine):
    """Raises `TransportError` if the device cannot map the memory of this rank."""

    def __init__(self, settings: Settings, place: Place) -> None:
        reducer = DeviceReducer(place)
        super().__init__(settings, LAYOUTS[settings.engine], reducer)
        reducer.use([self.segment.buffer])
        reducer.warm()
