"""Compiles every kernel for GPUs that need not be there, and looks at what came of it.

    python -m tests.kernels.compiled                      # a table for all targets, and what is wrong; exit code 1 if
    python -m tests.kernels.compiled --target sm_90 --json

Bandwidth is decided here: a pointer whose alignment the compiler does not know is read 16 bits at a time, and nothing
but a benchmark on a GPU would tell. So is correctness: a load that may be served by a cache that nobody updates
(`ld.global.nc`), a signal without a barrier before it, and a wait without one behind it all pass every test in Triton's
interpreter. What registers cannot hold goes to local memory, which is as slow as what it was to be faster than.

Needs a process in which kernels are not interpreted, and neither GPU nor driver. For a target that is not NVIDIA's,
what has no PTX of its own in it is compiled, and no more is asked of it: what fails there is a warning.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator

import click
import msgspec
import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ftcomm.engines.gpu_kernel.loaded import scratch_addresses
from ftcomm.kernels.device import INTERPRETED
from tests.kernels.cases import KernelCase, cases
from tests.kernels.ptx import WIDE, ControlFlowGraph, Loop, parse

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


class Facts(msgspec.Struct, frozen=True):
    """One case on one target. What only PTX and a cubin tell is None elsewhere, and where nothing came of it."""

    target: str
    kernel: str
    case: str
    error: str | None = None  # of the compiler
    registers: int | None = None  # of a thread
    shared: int | None = None  # bytes of a program
    local: int | None = None  # bytes of a thread: what was spilled
    loops: list[Loop] = []
    signals: int | None = None  # releases at system scope
    waits: int | None = None  # acquiring loads or fences likewise
    noncoherent: int | None = None  # loads through a cache that writes of others do not reach
    problems: list[str] = []  # why this must not run

    @property
    def warning(self) -> bool:
        return self.error is not None and not self.target.startswith("sm_")


def examine(case: KernelCase, target: str) -> Facts:
    """Compile one. A compiler that fails is a fact."""
    facts = Facts(target, case.kernel, case.name)
    if not case.portable and not target.startswith("sm_"):
        return msgspec.structs.replace(facts, error="its waits and signals are PTX")
    try:
        kernel = triton.compile(_source(case), target=_gpu(target), options=case.options)
    except Exception as error:  # whatever any stage of the compiler raises
        facts = msgspec.structs.replace(facts, error=_summary(error))
        return facts if facts.warning else msgspec.structs.replace(facts, problems=["it does not compile"])
    if "ptx" not in kernel.asm:
        return msgspec.structs.replace(facts, shared=kernel.metadata.shared)
    graph = ControlFlowGraph(parse(kernel.asm["ptx"]))
    registers, local = _resources(kernel.asm["cubin"])
    facts = msgspec.structs.replace(
        facts,
        registers=registers,
        shared=kernel.metadata.shared,
        local=local,
        loops=graph.main_loops(32 if case.coded else WIDE),
        signals=sum(i.releases for i in graph.instructions),
        waits=sum(i.acquires and not i.releases for i in graph.instructions),
        noncoherent=sum(".nc" in i.name for i in graph.instructions),
    )
    found = list(problems(case, facts, graph))
    if case.kernel in ("allreduce", "collective") and scratch_addresses(kernel, len(case.types)) is None:
        found.append("only Triton's launcher, which is slow, can launch it")
    return msgspec.structs.replace(facts, problems=found)


def problems(case: KernelCase, facts: Facts, graph: ControlFlowGraph) -> Iterator[str]:
    """What contradicts the case, in words. None: it may run."""
    if len(facts.loops) < case.loops:
        yield f"{len(facts.loops)} loops move whole tiles, expected {case.loops}; a mask or scalars in the others?"
    for loop in facts.loops:
        widths = {**loop.loads, **loop.stores}
        wide = sum(n for kind in (loop.loads, loop.stores) for bits, n in kind.items() if bits >= WIDE)
        narrow = sum(n for kind in (loop.loads, loop.stores) for bits, n in kind.items() if bits < WIDE)
        if min(widths) <= 16:
            yield f"a main loop moves {min(widths)} bits at a time: {_loop(loop)}; is an alignment unknown?"
        elif not case.coded and (
            max(loop.stores, default=0) < WIDE or max(loop.loads, default=0) < WIDE or narrow > wide
        ):
            yield f"a main loop does not move {WIDE} bits at a time: {_loop(loop)}; is an alignment unknown?"
    if case.coded and (n := sum(max((*loop.loads, *loop.stores)) < WIDE for loop in facts.loops)) > case.coded:
        yield f"{n} main loops move nothing {WIDE} bits at a time, {case.coded} may; is an alignment unknown?"
    if (facts.local or 0) > case.local:
        yield f"{facts.local} bytes a thread in local memory: {facts.registers} registers do not hold it"
    if facts.noncoherent:
        yield f"{facts.noncoherent} loads through the non-coherent cache, which may give what was there before"
    for name, there, expected in (("signals", facts.signals, case.signals), ("waits", facts.waits, case.waits)):
        if (there or 0) < expected:
            yield f"{there} {name} at system scope, expected {expected}"
    if n := graph.unordered_signals():
        yield f"{n} signals with no barrier between them and stores before them"
    if n := graph.unordered_waits():
        yield f"{n} waits with no barrier between them and accesses behind them"
    unfenced = sum(not loop.behind for loop in facts.loops)
    if case.unfenced is not None and unfenced > case.unfenced:
        yield f"{unfenced} main loops lie behind no fence, {case.unfenced} may"
    if sum(loop.behind >= 2 for loop in facts.loops) < case.twice:
        yield f"fewer than {case.twice} main loops lie behind two fences"


def _source(case: KernelCase) -> ASTSource:
    """The types as `triton.compile` wants them: without ":16", of which it is told separately."""
    signature, attributes = {}, {}
    for i, name in enumerate(case.function.arg_names):
        kind = case.types.get(name, "constexpr")
        parts = kind if isinstance(kind, tuple) else (kind,)
        plain = tuple(part.partition(":")[0] for part in parts)
        signature[name] = plain if isinstance(kind, tuple) else plain[0]
        for j, part in enumerate(parts):
            if part.endswith(":16"):
                attributes[(i, j) if isinstance(kind, tuple) else (i,)] = [["tt.divisibility", 16]]
    return ASTSource(case.function, signature, case.constexprs, attributes)


def _gpu(target: str) -> GPUTarget:
    kind, _, number = target.partition("_")
    return GPUTarget("cuda", int(number), 32) if kind == "sm" else GPUTarget("hip", target, 64)


def _resources(cubin: bytes) -> tuple[int, int]:
    """-> (registers, bytes of local memory) of a thread, by the cuobjdump that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, timeout=230, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _summary(error: BaseException) -> str:
    """What the innermost error says first."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


# ---- the command --------------------------------------------------------------------------------------------------


def _loop(loop: Loop) -> str:
    """One main loop: "8x128 -> 2x128"."""
    loads, stores = (" ".join(f"{n}x{bits}" for bits, n in kind.items()) for kind in (loop.loads, loop.stores))
    return f"{loads or '-'} -> {stores or '-'}"


def _table(rows: Iterable[Facts]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("target", "kernel", "case"):
        table.add_column(name, no_wrap=True)
    for name in ("registers", "shared", "spilled"):
        table.add_column(name, justify="right")
    table.add_column("main loops: loads -> stores (times bits, of a thread in a turn)")
    for facts in rows:
        loops = "; ".join(dict.fromkeys(_loop(loop) for loop in facts.loops))
        said = [f"[red]{problem}[/]" for problem in facts.problems]
        if facts.error:
            said.append(f"[yellow]{'warning: ' * facts.warning}{facts.error}[/]")
        figures = ("" if n is None else str(n) for n in (facts.registers, facts.shared, facts.local))
        table.add_row(facts.target, facts.kernel, facts.case, *figures, "\n".join(filter(None, (loops, *said))))
    return table


@click.command()
@click.option(
    "--target", "targets", multiple=True, help=f"sm_NN or gfxNNN; may be given again.  [default: {', '.join(TARGETS)}]"
)
@click.option("--kernel", "kernels", multiple=True, help="Only this kernel; may be given again.")
@click.option("--typical", is_flag=True, help="Only the typical cases of each kernel.")
@click.option("--crowded", is_flag=True, help="Only the cases that need the most registers.")
@click.option("--json", "as_json", is_flag=True, help="Facts as JSON on standard output.")
def main(targets: tuple[str, ...], kernels: tuple[str, ...], typical: bool, crowded: bool, as_json: bool) -> None:
    """Compile every kernel for GPUs that need not be there, and look at what came of it."""
    if INTERPRETED:
        raise click.UsageError("TRITON_INTERPRET=1 is set, so no kernel can be compiled; unset it.")
    found = []
    for target in targets or TARGETS:
        if re.fullmatch(r"sm_\d+|gfx\w+", target) is None:
            raise click.UsageError(f"--target {target}: expected one like {', '.join(TARGETS)}.")
        for case in cases():
            chosen = (case.typical and typical) or (case.crowded and crowded) or not (typical or crowded)
            if chosen and (not kernels or case.kernel in kernels):
                found.append(examine(case, target))
    if not found:
        raise click.UsageError(f"no kernel is named {', '.join(kernels)}.")
    if as_json:
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    else:
        Console(width=None if sys.stdout.isatty() else 160, highlight=False).print(_table(found))
    if wrong := sum(bool(facts.problems) for facts in found):
        click.echo(f"{wrong} of {len(found)} must not run.", err=True)
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    main()
