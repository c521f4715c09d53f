"""For tests with trainers of other libraries."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from tests.process import job
from tests.rigs import preforked_ranks as ranks


@pytest.fixture(scope="module")
def _fork_server() -> Iterator[None]:
    """In place of the one of all tests, since to import these libraries takes a rank longer than all that it does. The
    server that workers of `pytest -n` share has imported them."""
    context = multiprocessing.get_context("forkserver")
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    context.set_forkserver_preload([*job.PRELOADED, *job.trainers()])
    ranks.warm()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    context.set_forkserver_preload(job.PRELOADED)
