"""What the suites have shown, as a page of the documents."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.upstream.outcomes import BACKENDS, partial, rows

SUITES = {
    "torch": "`torch.testing._internal.distributed.distributed_test`, three ranks",
    "torchft": "torchft's tests that make process groups",
}

HEAD = """# Suites of others

torch and torchft have tests of process groups. `make test-upstream` runs them from the installed packages, on both
versions of torch, with gloo and with ftcomm, and writes this page. It fails if a test that gloo passes fails on ftcomm
without a reason in `tests/upstream/reasons.py`.
"""

NOTES = """
## How they are run

- `tests/upstream/suite_torch.py` lets ftcomm answer to gloo's name, since torch's tests choose by the backend's name
  what to skip. So ftcomm is asked for all that gloo can do. `test_barrier_timeout_*` have groups with a timeout of 1 s
  and of 5 s, and run with `FTCOMM_HEARTBEAT_TIMEOUT=0.5`: with the default of 5 s an error asks for that.
- `tests/upstream/suite_torchft.py` takes `process_group_test`, `reconfigure_test`, `parameter_server_test`,
  `manager_integ_test` and `local_sgd_integ_test` as they are in the wheel. Where they make a `ProcessGroupGloo`, a
  `ProcessGroupBabyGloo` or gloo's native group they make one of ftcomm, by torchft's own wrappers and by the
  reconfigure contract (`tests/upstream/torchft_groups.py`). torchft's other tests make no process group, or one of
  mocks or of NCCL; `manager_test` has one of gloo, whose name it compares.
- torchft's suite needs the reconfigure contract, so torch 2.14 or later.
- Tests that skip with both are left out of the tables.
"""


def tables(told: dict[str, Any]) -> str:
    """The outcomes on one version of torch."""
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    text = f"\n## {versions}\n\nRun on {told['date']}.\n\n"
    text += "| suite | backend | passed | failed | skipped |\n|---|---|---|---|---|\n"
    for suite in told["suites"]:
        for backend in BACKENDS:
            count = Counter(each.split(":")[0] for each in told["suites"][suite][backend].values())
            text += f"| {SUITES[suite]} | {backend} | {count['passed']} | {count['failed']} | {count['skipped']} |\n"
    for suite in told["suites"]:
        if some := partial(told, suite):
            text += f"\nOf {suite} only a part has run: {', '.join(f'`-k {each!r}`' for each in some)}.\n"
    for suite in told["suites"]:
        if not (found := rows(told, suite)):
            continue
        text += f"\n### {suite}, test by test, torch {told['versions']['torch']}\n\n"
        different = [row for row in found if row[1] != row[2]]
        if different:
            text += "These differ:\n\n| test | gloo | ftcomm | why |\n|---|---|---|---|\n"
            text += "".join(f"| `{name}` | {gloo} | {ours} | {why} |\n" for name, gloo, ours, why in different) + "\n"
        for outcome, what in (("passed", "Both pass"), ("failed", "Both fail")):
            if names := [name for name, gloo, ours, _ in found if gloo == ours == outcome]:
                text += f"{what} ({len(names)}): {', '.join(f'`{name}`' for name in names)}.\n\n"
    return text


def page(all_told: Sequence[dict[str, Any]]) -> str:
    """The whole page, of one or several versions of torch."""
    text = HEAD + "".join(tables(told) for told in all_told) + NOTES
    return re.sub(r"\n{3,}", "\n\n", text)
