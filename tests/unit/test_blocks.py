"""How many programs an op gets: never more than fit, never more than the user allows, and no idle ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftcomm.engines.gpu_kernel.blocks import programs, room, wanted

SIZES = st.integers(0, 1 << 40)
LANES = st.integers(0, 128)


@given(SIZES, LANES, st.none() | st.integers(1, 200), st.integers(1, 200))
def test_caps_hold_and_nobody_is_idle(nbytes: int, lanes: int, sms: int | None, fit: int) -> None:
    grid = programs(nbytes, lanes, sms, fit)
    caps = [max(1, lanes), fit, wanted(nbytes) if sms is None else sms]
    assert 1 <= grid <= min(caps)
    rounds = -(-max(1, lanes) // min(caps))
    assert -(-max(1, lanes) // grid) == rounds  # as fast as the most that is allowed
    assert grid == 1 or -(-max(1, lanes) // (grid - 1)) > rounds  # and with no program that could be spared


@given(st.integers(2, 300), st.integers(1, 16))
def test_all_ranks_fit_and_one_multiprocessor_is_left(multiprocessors: int, sharing: int) -> None:
    assert room(multiprocessors, sharing) * sharing <= multiprocessors - 1
    assert (room(multiprocessors, sharing) + 1) * sharing > multiprocessors - 1


def test_sizes() -> None:
    assert [wanted(n) for n in (0, 1, 64 << 10, (64 << 10) + 1, 1 << 20, 256 << 20)] == [1, 1, 1, 2, 16, 16]
    assert wanted(1 << 30) == 32
    assert room(132, 8) == 16  # H200
    assert room(132, 1) == 131
    assert programs(1 << 30, 64, None, room(132, 8)) == 16
    assert programs(1 << 30, 64, 4, room(132, 8)) == 4
    assert programs(1 << 30, 64, 15, 16) == 13
    assert programs(4096, 1, None, 16) == 1


@given(SIZES, SIZES)
def test_more_bytes_never_get_fewer(a: int, b: int) -> None:
    assert wanted(min(a, b)) <= wanted(max(a, b))


@pytest.mark.parametrize(("sms", "fit"), [(0, 4), (4, 0), (-1, 4)])
def test_none_at_all_is_an_error(sms: int, fit: int) -> None:
    with pytest.raises(ValueError, match=f"{sms=}, {fit=}"):
        programs(1 << 20, 8, sms, fit)
