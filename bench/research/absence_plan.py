"""Plans which replica is away when in `ftcomm bench accuracy`: drawn from a seed, in steps."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

from ftcomm.errors import SettingsError

FIRST = 8  # steps that all begin with
LAST = 16  # and end with: who came back last has caught up by then
SETTLE = 20  # steps after an absence in which the one that is back may still be catching up
TRIES, TRIES_OF_ONE = 20, 500


class Absence(msgspec.Struct, frozen=True):
    replica: int
    begin: int  # the step in which it is killed
    end: int  # the step from which on it contributes again, or nearly so


def draw(seed: int, replicas: int, steps: int, share: float, times: int) -> list[Absence]:
    """`times` absences of each replica, of random lengths that make `share` of all steps, at random places; never more
    than half of the replicas at once. Pure. Raises `SettingsError` if that cannot be had."""
    chance = random.Random(seed)
    for _ in range(TRIES):
        found = _of_all(chance, replicas, steps, round(share * steps), times)
        if found is not None:
            return sorted(found, key=lambda one: one.begin)
    raise SettingsError(
        f"no way was found in which {replicas} replicas are away for {share:.0%} of {steps} steps and never more than "
        "half of them at once; lower --down."
    )


def most_away(absences: Sequence[Absence]) -> int:
    """Replicas at once, those that may still be catching up among them: they have no state to give."""
    return max((sum(one.begin <= at.begin < one.end + SETTLE for one in absences) for at in absences), default=0)


def _of_all(chance: random.Random, replicas: int, steps: int, down: int, times: int) -> list[Absence] | None:
    """One replica after the other; None if there is no room left for one."""
    found: list[Absence] = []
    for replica in range(replicas):
        for _ in range(TRIES_OF_ONE):
            more = _of_one(chance, replica, steps, down, times)
            if most_away([*found, *more]) <= replicas // 2:
                found += more
                break
        else:
            return None
    return found


def _of_one(chance: random.Random, replica: int, steps: int, down: int, times: int) -> list[Absence]:
    up = steps - FIRST - LAST - down
    if times < 1 or down < times or up < times - 1:
        raise SettingsError(
            f"{times} absences of {down} steps in all do not fit into {steps} steps; raise --steps or lower --times."
        )
    away = _parts(chance, down, times, max(1, down // (2 * times)))
    # Between two absences as many steps as half of their mean share; before the first and after the last any number.
    between = up // (2 * times)
    free = _parts(chance, up - between * (times - 1), times + 1, 0)
    absences = []
    at = FIRST
    for number, length in enumerate(away):
        at += free[number] + (between if number else 0)
        absences.append(Absence(replica, at, at + length))
        at += length
    return absences


def _parts(chance: random.Random, total: int, count: int, least: int) -> list[int]:
    """Cut `total` into `count` parts of at least `least`, at random places."""
    cuts = sorted(chance.randint(0, total - least * count) for _ in range(count - 1))
    ends = [*cuts, total - least * count]
    return [least + end - begin for begin, end in zip([0, *cuts], ends, strict=True)]
