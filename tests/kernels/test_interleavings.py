"""Every interleaving of a launch's programs, its host and view changes, and that each guard is needed."""

from __future__ import annotations

import inspect

import pytest

from ftcomm.kernels.device import INTERPRETED, attempts

from .interleavings import Broken, explore

pytestmark = [
    pytest.mark.protocol,
    pytest.mark.skipif(not INTERPRETED, reason="what is compiled cannot be read as Python"),
]


@pytest.mark.parametrize(
    ("programs", "launches", "epochs", "close"), [(1, 2, 2, False), (2, 1, 2, False), (1, 2, 2, True)]
)
def test_every_interleaving(programs: int, launches: int, epochs: int, close: bool) -> None:
    """Nothing is touched while the host writes, no lane is served twice in an epoch, an op returns when all lanes are
    through, its number is its own, and all of it ends."""
    explored = explore(programs, launches, epochs, close=close)
    print(explored)
    assert explored.ends


GUARDS = {
    "the fence between BEGUN and OPEN": (1, "full_fence()", "pass", "while the host writes it"),
    "the second look at OPEN": (1, "load(ctl + OPEN, THREADS) == epoch", "True", "while the host writes it"),
    "the end of an op that the host has returned": (1, "> number):", "> number + 9):", "were not counted"),
    "the news of each epoch": (1, "load(view + EPOCH, THREADS) != epoch", "number < 0", "of another"),
    "the flags of each epoch": (1, "raise_flags(view, epoch, LANES)", "pass", "before the flags are raised"),
    "the count of lanes begins anew": (1, "write(state + NEXT, 0)", "pass", "were not counted"),
    "so does that of lanes that are done": (2, "write(state + DONE, 0)", "pass", "were not counted"),
    "an op with a lane that is not through goes on": (1, "add(state + DONE, 0) == lanes", "True", "is not through"),
    "the words for the next launch": (1, "write(state + NOW, 0)", "pass", "not set back"),
    "the end of an attempt": (2, "exchange(state + NOW, 0)", "pass", "of another epoch"),
    "the second look at NOW": (2, "inside = again == now", "inside = again != 0 - 1", "of another epoch"),
    "the wait until nobody is inside": (2, "while add(state + INSIDE, 0) != 0:", "while False:", "nothing runs"),
}


@pytest.mark.parametrize("guard", GUARDS)
def test_without_a_guard_something_breaks(guard: str) -> None:
    programs, old, new, said = GUARDS[guard]
    assert inspect.getsource(attempts).count(old) == 1
    with pytest.raises(Broken, match=said) as broken:
        explore(programs, 1, 2, change=(old, new))
    print(broken.value)
