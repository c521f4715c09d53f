"""`ftcomm bench views` on small jobs: what does not depend on how many ranks a replica has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ftcomm.bench.control_views import ViewsCost, ViewsRequest, measure
from ftcomm.errors import SettingsError


def costs(ranks: int) -> dict[tuple[str, str], ViewsCost]:
    found: list[ViewsCost] = []
    report: Any = SimpleNamespace(progress=lambda *said: None, add=found.append)
    measure(ViewsRequest(3, ranks, 4), report)
    return {(cost.what, cost.part): cost for cost in found}


def test_what_a_loss_costs_does_not_grow_with_the_ranks_but_at_the_leaders() -> None:
    few, many = costs(16), costs(64)
    assert {what for what, _ in few} == {"start", "loss", "return"}
    at_few, at_many = few["loss", "coordinator"], many["loss", "coordinator"]
    assert (at_few.received, at_few.sent) == (at_many.received, at_many.sent)
    assert at_many.sent_mb == pytest.approx(at_few.sent_mb, abs=1e-5), "no addresses are told again"
    told = [cost.sent_mb / cost.sent for cost in (few["loss", "all leaders"], many["loss", "all leaders"])]
    assert told[1] == pytest.approx(told[0], rel=0.2), "each rank gets the same few bytes"
    assert max(told) < 150e-6, "and nothing of members that are as they were"


def test_a_job_without_a_rank_for_each_host_is_refused() -> None:
    with pytest.raises(SettingsError, match="--hosts 5: expected"):
        ViewsRequest(2, 4, 5).check()
