"""Every kernel, compiled for GPUs that need not be there: what decides bandwidth and order, by PTX and cubin."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from tests.kernels import compiled as module

pytestmark = pytest.mark.protocol

ROOT = Path(__file__).parents[2]
EACH = {"reduce", "allreduce", "collective"}


# What is compiled is kept for this one process, so nothing tells it from what another Triton made: that would be half a
# gigabyte, of which Triton takes a digest.
COMPILE = """
import runpy, sys
import triton.runtime.cache
triton.runtime.cache.triton_key = lambda: "this one"
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def compiled(cache: Path, *module: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """By a process that compiles, as if it were the first on this machine."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-c", COMPILE, *module],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "which", "kernels", "least"),
    [
        ("sm_90", ["--typical"], EACH, 5),
        # its compiler needs the most registers
        pytest.param("sm_80", ["--crowded"], EACH - {"reduce"}, 2, marks=pytest.mark.sweep),
        pytest.param("sm_80", ["--typical"], EACH, 5, marks=pytest.mark.sweep),
        pytest.param("sm_100", ["--typical", "--crowded"], EACH, 6, marks=pytest.mark.sweep),
        pytest.param("sm_90", [], EACH, 21, marks=pytest.mark.sweep),
    ],
)
def test_every_kernel(tmp_path: Path, target: str, which: list[str], kernels: set[str], least: int) -> None:
    """Main loops move 128 bits at a time, nothing is spilled, barriers and fences are where they have to be."""
    done = compiled(tmp_path, "tests.kernels.compiled", "--json", *which, "--target", target, timeout=580)
    assert done.stdout, done.stderr
    found = msgspec.json.decode(done.stdout)
    wrong = [(facts["target"], facts["kernel"], facts["case"], facts["problems"]) for facts in found]
    assert not [each for each in wrong if each[-1]]
    assert done.returncode == 0, done.stderr
    assert {facts["kernel"] for facts in found} == kernels
    assert len({facts["case"] for facts in found}) >= least
    assert all(0 < facts["registers"] < 256 for facts in found)


SAID = {
    "sound": (),
    "no hint, 16 bits": ("a main loop moves 16 bits at a time: 16x16 -> 16x16",),
    "no hint, 32 bits": ("0 loops move whole tiles, expected 1",),
    "masked": ("0 loops move whole tiles, expected 1",),
    "half a hint, 16 bits": ("a main loop moves 16 bits at a time: 2x128 -> 16x16",),
    "half a hint, 32 bits": ("a main loop does not move 128 bits at a time: 4x128 -> 16x32",),
    "spilled": ("bytes a thread in local memory",),
    "non-coherent": ("1 loads through the non-coherent cache",),
    "early signal": ("1 signals with no barrier between them and stores before them",),
    "early wait": ("1 waits with no barrier between them and accesses behind them",),
    "sound order": (),
    "no fence": ("0 waits at system scope, expected 1", "1 main loops lie behind no fence, 0 may"),
    "no signal": ("0 signals at system scope, expected 1",),
    "no program": ("it does not compile",),
}


def test_what_is_broken_is_reported(tmp_path: Path) -> None:
    done = compiled(tmp_path, "tests.kernels.broken", timeout=230)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout, type=dict[str, list[str]])
    assert found.keys() == SAID.keys()
    for name, expected in SAID.items():
        assert len(found[name]) == len(expected), (name, found[name])
        assert all(text in said for text, said in zip(expected, found[name], strict=True)), (name, found[name])


def test_interpreted_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERPRETED", True)
    done = CliRunner().invoke(module.main, [])
    assert done.exit_code == 2
    assert "TRITON_INTERPRET=1 is set" in done.output


def test_every_kernel_has_a_case() -> None:
    """Those that are launched are called something_kernel, but those of whole ops."""
    cases = (ROOT / "tests/kernels/cases.py").read_text()
    sources = "".join(file.read_text() for file in (ROOT / "kernels/device").glob("*.py"))
    kernels = re.findall(r"^@triton\.jit.*\ndef (\w+_kernel|allreduce|collective)\(", sources, re.MULTILINE)
    assert sorted(kernels) == ["allreduce", "collective", "reduce_kernel"]
    assert [name for name in kernels if not re.search(rf"\b{name}\b", cases)] == []


def test_no_kernel_is_written_in_another_language() -> None:
    """CUDA C would have to be compiled here too, by NVRTC."""
    found = [
        str(file.relative_to(ROOT))
        for folder in ("bench", "control", "ftcomm", "kernels")
        for file in (ROOT / folder).rglob("*.py")
        if any(name in file.read_text() for name in ("RawKernel", "RawModule", "__global__"))
    ]
    assert found == []
