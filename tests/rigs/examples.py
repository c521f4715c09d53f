"""Tests by hypothesis that draw a few examples in `make test`, and more in `make test-sweeps`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn(few: int, many: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """In place of `settings` and `given`."""

    def decorate(body: Callable[..., None]) -> Any:
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.sweep)])
        @functools.wraps(body)
        def test(examples: int) -> None:
            settings(max_examples=examples, deadline=None)(given(*strategies)(body))()

        del test.__wrapped__  # type: ignore[attr-defined]  # whose arguments pytest would take for fixtures
        return test

    return decorate
