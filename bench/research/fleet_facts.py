"""The constants of `ftcomm bench fleet`: each with its unit in the name, and where it is from.

Two kinds of facts: how often GPUs fail, and what a failure costs. The second is a `FleetPipeline`, a list of named
parts, so that a table can say what a stall is made of. Ours is not written here: `fleet_measured.py` reads it from
results.
"""

from __future__ import annotations

import bisect
import math

import msgspec

from ftcomm.errors import SettingsError

HOUR, DAY = 3600.0, 86400.0
FT_HSDP = "FT-HSDP, arXiv 2602.00277"
LLAMA = "Llama 3, arXiv 2407.21783, section 3.3.4"


class Constant(msgspec.Struct, frozen=True):
    name: str
    value: float
    unit: str
    source: str


class Failures(msgspec.Struct, frozen=True):
    """One unexpected interruption every `gpu_hours` hours of one GPU; more GPUs fail that much more often."""

    name: str
    gpu_hours: float
    source: str

    def interval(self, gpus: int) -> float:
        """Mean seconds between two failures among `gpus`."""
        return self.gpu_hours * HOUR / gpus


FAILURES = {
    "paper": Failures("paper", 98_304 * 18 / 60, f"{FT_HSDP}: every 18 minutes at 98,304 GPUs"),
    "paper-32k": Failures("paper-32k", 8 * 1000 * 24 / 2.3, f"{FT_HSDP}: 2.3 a day in 1,000 servers of 8, at 32K GPUs"),
    "llama3": Failures("llama3", 16_384 * 54 * 24 / 419, f"{LLAMA}: 419 in 54 days at 16,384 GPUs"),
}

# Interruptions of Llama 3 after which a host, or the network to it, is gone without a word: a process that dies, on a
# host that lives, is heard of at once. Switch or cable, host maintenance, NIC, power supply, chassis, IO board, SSD,
# NCCL timeout.
SILENT = Constant("silent_share", (35 + 32 + 7 + 3 + 2 + 2 + 3 + 7) / 419, "of failures", f"{LLAMA}, table 5")

# How long the start of communication takes, of the seconds that a cold start takes: the paper's share at four sizes.
_START_GPUS = (16_384, 22_528, 65_536, 98_304)
_START_SHARE = (17.0, 30.0, 100.0, 200.0)


def start_share(gpus: int) -> float:
    """The share of the start at 98,304 GPUs: between the paper's four sizes a line, below and above a ray."""
    place = min(max(bisect.bisect_left(_START_GPUS, gpus), 1), len(_START_GPUS) - 1)
    if gpus <= _START_GPUS[0]:
        seconds = _START_SHARE[0] * gpus / _START_GPUS[0]
    else:
        (a, b), (low, high) = _START_GPUS[place - 1 : place + 1], _START_SHARE[place - 1 : place + 1]
        seconds = low + (high - low) * (gpus - a) / (b - a)
    return seconds / _START_SHARE[-1]


class FleetPipeline(msgspec.Struct, frozen=True):
    """The cost of a failure. All stand still for `stall`; the replica that was hit is away for `away` seconds."""

    name: str
    replicas: int  # that are lost one by one; 1: all restart
    stall: tuple[Constant, ...]  # seconds; their sum
    away: tuple[Constant, ...]  # seconds; their sum
    rejoin: tuple[Constant, ...] = ()  # seconds for which all stand still when it comes back
    stalls: tuple[float, ...] = ()  # seconds, measured, one drawn for each failure, beside `stall`
    silent_share: float = 0.0  # of failures, found by `silence` alone
    silence: float = 0.0  # seconds
    step: float = 0.0  # seconds; of the step in progress the replica that was hit has lost its own part
    checkpoint: float = 0.0  # seconds between checkpoints, back to which all go; 0: no work is lost

    def seconds(self, parts: str) -> float:
        return math.fsum(part.value for part in getattr(self, parts))

    def mean_stall(self) -> float:
        drawn = math.fsum(self.stalls) / len(self.stalls) if self.stalls else 0.0
        return self.seconds("stall") + drawn + self.silent_share * self.silence


def restart(gpus: int, checkpoint: float = 0.0) -> FleetPipeline:
    """All GPUs stop, and start again from a checkpoint. The parts sum to the paper's ten minutes at 98,304 GPUs."""
    return FleetPipeline(
        "restart",
        1,
        stall=(
            Constant("detect", 60.0, "s", FT_HSDP),
            Constant("schedule", 120.0, "s", FT_HSDP),
            Constant("load the checkpoint", 120.0, "s", FT_HSDP),
            Constant(
                "start communication, first step",
                300.0 * start_share(gpus),
                "s",
                f"{FT_HSDP}: what the three others leave of its ten minutes; by size as its cold starts",
            ),
        ),
        away=(),
        checkpoint=checkpoint,
    )


AWAY = Constant("restart of the replica", 600.0, "s", f"{FT_HSDP}: ten minutes, at any size")
STEP = Constant("step", 20.0, "s", FT_HSDP)


def ft_hsdp(replicas: int) -> FleetPipeline:
    """The parts sum to the paper's three minutes. A rejoin stalls no replica, as in its formula; it speaks of 100 s."""
    return FleetPipeline(
        "ft-hsdp",
        replicas,
        stall=(
            Constant("timeout of the all-reduce", 60.0, "s", FT_HSDP),
            Constant("power smoother", 45.0, "s", f"{FT_HSDP}, a defect"),
            Constant("needless reconfiguration", 45.0, "s", f"{FT_HSDP}, a defect"),
            Constant("the discarded step", STEP.value, "s", FT_HSDP),
            Constant("reconfiguration", 10.0, "s", f"{FT_HSDP}: what the others leave of its three minutes"),
        ),
        away=(AWAY,),
    )


def ft_hsdp_at_best(replicas: int) -> FleetPipeline:
    """FT-HSDP without the two defects that the paper names: the minute and a half that it calls possible."""
    whole = ft_hsdp(replicas)
    stall = tuple(part for part in whole.stall if "defect" not in part.source)
    return msgspec.structs.replace(whole, name="ft-hsdp, mended", stall=stall)


def check_replicas(gpus: int, replicas: int) -> None:
    """Raise `SettingsError`, with the mend."""
    if not 2 <= replicas <= gpus:
        raise SettingsError(f"--replicas {replicas} of {gpus} GPUs: expected 2 or more, and no more than GPUs.")
