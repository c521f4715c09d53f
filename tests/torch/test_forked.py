"""A forked child of a rank is refused by every call of torch.distributed, and its rank goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.rigs import preforked_ranks

SCRIPT = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("ftcomm")
x = torch.ones(3)
other = dist.new_group([0, 1])
calls = {
    "all_reduce": lambda: dist.all_reduce(x),
    "async": lambda: dist.all_reduce(x, async_op=True).wait(),
    "other group": lambda: dist.all_reduce(x, group=other),
    "broadcast": lambda: dist.broadcast(x, 0),
    "barrier": dist.barrier,
    "new_group": lambda: dist.new_group([0, 1]),
    "send": lambda: dist.send(x, 1 - dist.get_rank()),
    "all_gather_object": lambda: dist.all_gather_object([None] * 2, 3),
    "destroy": dist.destroy_process_group,
}
for name, call in calls.items():
    pid = os.fork()
    if pid == 0:
        try:
            call()
            print(f"child {name}: returned", flush=True)
        except Exception as error:
            print(f"child {name}: {type(error).__name__} {'forked child' in str(error)}", flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
dist.all_reduce(x)
print(f"end {x.tolist()}", flush=True)
"""


@pytest.mark.protocol
def test_children_of_a_process_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*preforked_ranks.FTCOMM, "run", "--replicas", "2", str(script)]
    code, out, errors = preforked_ranks.completed(command, {**os.environ, "FTCOMM_TRANSPORT": "tcp"})
    assert code == 0, out + errors
    said = [line for line in out.splitlines() if "child" in line or "end" in line]
    for rank in (0, 1):
        mine = [line.partition("] ")[2] for line in said if line.startswith(f"[{rank}]")]
        assert len([line for line in mine if line.endswith("FtcommError True")]) == 8, mine
        assert "child destroy: returned" in mine
        assert mine[-1] == "end [2.0, 2.0, 2.0]"
