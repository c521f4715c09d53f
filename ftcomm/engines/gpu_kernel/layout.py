"""The memory of a rank whose ops a kernel runs: the words of a segment as ever, lanes behind them, then staging.

    bytes 0..4095    header, ASLEEP, mutexes: as in every segment; words EXPORT_AT.. say where the device's memory is
    lane words       a line for each lane: the copy of POSTED, REDUCED, TAKEN, see ftcomm.kernels.device.words
    staging          2 regions (POSTED, REDUCED) x lanes x SLOTS x chunk bytes, then that of the copies; here, or in
                     memory of the device
    flags            a line for each lane, behind the staging

A lane is an independent stream of chunk tasks, see ftcomm.kernels.device.allreduce.
"""

from __future__ import annotations

from ftcomm.engines.gpu_kernel.copies import SLOTS_IN_ALL as COPY_SLOTS
from ftcomm.kernels.device.words import LANES_AT, LINE, SLOTS
from ftcomm.transport.segment import Layout

EXPORT_AT = 256  # index of the first of EXPORT_WORDS words in which a device says how to open its memory
EXPORT_WORDS = 128
COPIES_AT = EXPORT_AT + EXPORT_WORDS  # the same for the copy-engine path

_MAGIC = 0x6674636F6D6D0100  # "ftcomm", layouts of devices from 0x100 on


def flag_bytes(lanes: int) -> int:
    """Returns the bytes that the flags of so many lanes take."""
    return lanes * LINE * 8


def device_layout(kind: int, name: str, lanes: int, chunk: int, *, staged_here: bool) -> Layout:
    """`kind` tells the devices apart, `name` is what FTCOMM_ENGINE calls it; `staged_here`: staging and flags lie in
    the segment itself."""
    words = (LANES_AT + lanes * LINE) * 8
    start = -(-words // 4096) * 4096
    staging = 2 * lanes * SLOTS * chunk + COPY_SLOTS * chunk + flag_bytes(lanes)
    return Layout(
        magic=_MAGIC + kind,
        engine=name,
        slots=SLOTS,
        chunk=chunk,
        lanes=lanes,
        staging_at=start,
        size=start + staging * staged_here,
    )


INTERPRETED = device_layout(1, "interpreter-kernel", 4, 64 << 10, staged_here=True)
CUDA = device_layout(2, "gpu-kernel", 64, 256 << 10, staged_here=False)
