"""A torchrun command line with `ftcomm run` in its place: the script finds the same variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, os, sys
with open(f"{sys.argv[1]}.{os.environ['RANK']}", "w") as file:
    json.dump(dict(os.environ), file)
"""

# Of torchrun alone: a file for the errors of @record, and settings of its own and of NCCL.
ITS_OWN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
# What differs from run to run.
NAMES = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS"}


def test_a_script_finds_torchruns_variables(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    outer = {name: value for name, value in os.environ.items() if not name.startswith("FTCOMM_")}
    for name, launcher in (
        ("torchrun", ["-m", "torch.distributed.run"]),
        ("ftcomm", ["-c", "from ftcomm.cli import main; main()", "run"]),
    ):
        subprocess.run(
            [
                sys.executable,
                *launcher,
                "--standalone",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
                "script.py",
                name,
            ],
            cwd=tmp_path,
            env=outer | {"XDG_RUNTIME_DIR": str(tmp_path)},
            check=True,
            capture_output=True,
            timeout=150,
        )
    for rank in range(2):
        theirs, ours = (json.loads((tmp_path / f"{name}.{rank}").read_text()) for name in ("torchrun", "ftcomm"))
        wanted = {name: value for name, value in theirs.items() if outer.get(name) != value and name not in ITS_OWN}
        assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} <= wanted.keys()
        assert wanted.keys() <= ours.keys()
        assert {name: ours[name] for name in wanted.keys() - NAMES} == {n: wanted[n] for n in wanted.keys() - NAMES}
