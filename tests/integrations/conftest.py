"""For tests with trainers of other libraries."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing import forkserver

import pytest

from tests.process import job
from tests.rigs import preforked_ranks as ranks

LIBRARIES = ("transformers.trainer", "lightning.pytorch")


@pytest.fixture(scope="module")
def _fork_server() -> Iterator[None]:
    """In place of the one of all tests, since to import these libraries takes a rank longer than all that it does."""
    context = multiprocessing.get_context("forkserver")
    there = [name for name in LIBRARIES if find_spec(name.partition(".")[0]) is not None]
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    context.set_forkserver_preload([*job.PRELOADED, *there])
    ranks.warm()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    context.set_forkserver_preload(job.PRELOADED)
