"""The terms that the step loops of all replicas must share besides the state: where they begin, and how they decide.

Loops that begin at other steps average the gradients of other data, and loops that decide otherwise call other ops or
scale by other rates. No descriptor of an op tells that. So each sends its terms before the first step, as numbers:

    LoopTerms(start=5, total=9, initial_state="check", vote=True, min_replicas=2, lr="none")   (6, 10, 1, 2, 3, 1)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ftcomm.collective.checksum import named
from ftcomm.training.lr_scaling import POLICIES as RATES

POLICIES = ("check", "lowest", "trust")  # the values of `initial_state`
_CHOICES: dict[str, tuple[Any, ...]] = {"initial_state": POLICIES, "vote": (False, True), "lr": tuple(RATES)}
_MOST = 1 << 62  # that a number may be, and one more still fit an int64
_SETTINGS = {"initial_state": " (FTCOMM_START)"}


@dataclasses.dataclass(frozen=True)
class LoopTerms:
    """The arguments of a `StepLoop` that must be equal on all ranks."""

    start: int
    total: int | None  # the number of steps, None: until the script ends
    initial_state: str
    vote: bool
    min_replicas: int
    lr: str

    def row(self) -> list[int]:
        """Returns the fields as numbers. Only `start` and `total` may be 0."""
        return [_number(name, value) for name, value in dataclasses.asdict(self).items()]

    @classmethod
    def of(cls, row: Sequence[int]) -> LoopTerms:
        return cls(*(_value(field.name, n) for field, n in zip(dataclasses.fields(cls), row, strict=True)))


SIZE = len(dataclasses.fields(LoopTerms))


def difference(terms: Mapping[int, LoopTerms]) -> str | None:
    """Returns the first term that differs, and where: "start=5 on replica 1, start=0 on replica 0"."""
    for field in dataclasses.fields(LoopTerms):
        name, setting = field.name, _SETTINGS.get(field.name, "")
        who: dict[Any, list[int]] = {}
        for replica, theirs in terms.items():
            who.setdefault(getattr(theirs, name), []).append(replica)
        if len(who) > 1:
            return ", ".join(f"{name}={value!r}{setting} on {named(tuple(them))}" for value, them in who.items())
    return None


def _number(name: str, value: Any) -> int:
    if name in _CHOICES:
        return int(_CHOICES[name].index(value)) + 1
    return 0 if value is None else int(min(value, _MOST)) + 1


def _value(name: str, number: int) -> Any:
    if name in _CHOICES:
        return _CHOICES[name][number - 1]
    return None if name == "total" and number == 0 else number - 1
