"""What a kernel became: its loops, how wide it loads and stores in them, and where its fences and barriers stand.

Read from PTX, where accesses are still as the compiler of Triton made them, by pure functions. The blocks of the text
make a graph, back edges of which make loops. A **main loop** is one that moves whole tiles: it has an access of its
own, not one of a loop within it, that no predicate guards, and that is more than a scalar, or four codes of fp8, where
a kernel moves those. Tails are guarded, and so is what one thread does for all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property

import msgspec

WIDE = 128  # bits: the most that one thread can ask for at once before sm_100


class Instruction(msgspec.Struct, frozen=True):
    guarded: bool  # by a predicate
    name: str  # with its suffixes, as ld.global.v4.b32
    operands: str

    @property
    def kind(self) -> str:
        """ "load" or "store" of global memory, plain or volatile; "" of anything else."""
        parts = self.name.split(".")
        if parts[0] not in ("ld", "st") or "global" not in parts:
            return ""
        return "load" if parts[0] == "ld" else "store"

    @property
    def bits(self) -> int:
        """Of one access."""
        match = re.search(r"(?:\.v(\d))?\.[bfus](\d+)$", self.name)
        if match is None:
            raise ValueError(f"{self.name!r} is an access of unknown width.")
        return int(match[1] or 1) * int(match[2])

    @property
    def scalar(self) -> bool:
        """As an address in a table, a scale or a counter is read."""
        return ".v" not in self.name.replace(".volatile", "") and self.bits >= 32

    @property
    def word(self) -> bool:
        """Of memory that others change meanwhile, so no matter of width."""
        return re.search(r"\.(volatile|acquire|release|relaxed)\b", self.name) is not None

    @property
    def releases(self) -> bool:
        """Tells other processors or the host that what precedes is done."""
        return re.match(r"(st|red|atom)\.(?=.*\bsys\b)(?=.*\b(release|acq_rel)\b)", self.name) is not None

    @property
    def acquires(self) -> bool:
        """What follows is not done before what precedes, with regard to other processors or the host."""
        return re.match(r"(ld|atom|fence)\.(?=.*\bsys\b)(?=.*\b(acquire|acq_rel|sc)\b)", self.name) is not None

    @property
    def barrier(self) -> bool:
        return self.name.startswith(("bar.sync", "barrier.sync"))


class BasicBlock(msgspec.Struct, frozen=True):
    label: str
    instructions: tuple[Instruction, ...]
    successors: tuple[int, ...]


class Loop(msgspec.Struct, frozen=True):
    """What one turn of a main loop does, by one thread, and one of the loops within: bits of an access -> how many."""

    loads: dict[int, int]
    stores: dict[int, int]
    behind: int  # fences or acquiring loads that every way to it has passed


def parse(text: str) -> list[BasicBlock]:
    """The blocks of the one kernel in `text`; the first is its entry. Raises `ValueError` on what it does not know."""
    body = text[text.index("\n{", text.index(".entry")) :]
    raw: list[tuple[str, list[Instruction]]] = [("entry", [])]
    for statement in _statements(body):
        if statement.endswith(":"):
            raw.append((statement[:-1], []))
            continue
        match = re.fullmatch(r"(@!?%?\w+)?\s*([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL)
        if match is None:
            raise ValueError(f"cannot read this PTX: {statement!r}")
        if match[2] == "brx.idx":
            raise ValueError("this PTX has a jump table, which is not followed.")
        raw[-1][1].append(Instruction(match[1] is not None, match[2], match[3]))
        if match[2].split(".")[0] in ("bra", "ret", "exit", "trap"):
            raw.append(("", []))
    index = {label: i for i, (label, _) in enumerate(raw) if label}
    return [
        BasicBlock(label, tuple(code), _successors(i, code, index, len(raw))) for i, (label, code) in enumerate(raw)
    ]


def _statements(body: str) -> Iterator[str]:
    """Instructions and labels, without braces, declarations and debug information."""
    body = re.sub(r"//[^\n]*", "", body)
    body = body[: _end(body)]
    for part in re.split(r";|\n(?=\s*\.(?:loc|file|pragma))", body):
        part = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*", "", part, flags=re.MULTILINE)
        part = part.strip()
        while match := re.match(r"([$\w]+:)|[{}]", part):
            if match[1]:
                yield match[1]
            part = part[match.end() :].strip()
        if part and not part.startswith("."):
            yield part


def _end(body: str) -> int:
    """Where the kernel's outermost brace is closed."""
    depth = 0
    for match in re.finditer(r"[{}]", body):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise ValueError("the kernel's text has no end.")


def _successors(i: int, code: list[Instruction], index: dict[str, int], count: int) -> tuple[int, ...]:
    last = code[-1] if code else None
    following = (i + 1,) if i + 1 < count else ()
    if last is None or last.name.split(".")[0] not in ("bra", "ret", "exit", "trap"):
        return following
    target = (index[last.operands.strip()],) if last.name.startswith("bra") else ()
    return target + following if last.guarded else target


class ControlFlowGraph:
    """The blocks of a kernel, and the questions that are asked of them."""

    def __init__(self, blocks: list[BasicBlock]) -> None:
        self.blocks = blocks

    @property
    def instructions(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block.instructions

    @cached_property
    def before(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.blocks]
        for i, block in enumerate(self.blocks):
            for successor in block.successors:
                found[successor].append(i)
        return found

    @cached_property
    def dominators(self) -> list[set[int]]:
        """For each block, those that lie on every way from the entry to it, itself too; empty: no way leads to it."""
        reached = {0}
        todo = [0]
        while todo:
            for successor in self.blocks[todo.pop()].successors:
                if successor not in reached:
                    reached.add(successor)
                    todo.append(successor)
        found = [{0}, *(set(reached) if i in reached else set() for i in range(1, len(self.blocks)))]
        changed = True
        while changed:
            changed = False
            for i in sorted(reached - {0}):
                new = {i}.union(set.intersection(*(found[p] for p in self.before[i] if p in reached)))
                changed |= new != found[i]
                found[i] = new
        return found

    @cached_property
    def loops(self) -> dict[int, set[int]]:
        """Head -> the blocks of the loop, those of loops within it too."""
        found: dict[int, set[int]] = {}
        for i, block in enumerate(self.blocks):
            for head in block.successors:
                if head in self.dominators[i]:
                    body = found.setdefault(head, {head})
                    todo = [i]
                    while todo:
                        inside = todo.pop()
                        if inside not in body:
                            body.add(inside)
                            todo.extend(self.before[inside])
        return found

    def main_loops(self, least: int) -> list[Loop]:
        """`least`: bits of an access that moves a tile though it is no vector, in a loop with no main loop within."""
        found = []
        tiles = [body for body in self.loops.values() if any(not i.scalar for i in self._own(body))]
        tiles += [
            body
            for body in self.loops.values()
            if any(i.bits == least for i in self._own(body)) and not any(tile <= body for tile in tiles)
        ]
        for head, body in sorted(self.loops.items()):
            if body not in tiles:
                continue
            widths = [Counter(i.bits for i in self._accesses(body) if i.kind == kind) for kind in ("load", "store")]
            loads, stores = (dict(sorted(kind.items(), reverse=True)) for kind in widths)
            fences = sum(
                i.acquires for block in self.dominators[head] - {head} for i in self.blocks[block].instructions
            )
            found.append(Loop(loads, stores, fences))
        return found

    def _own(self, body: set[int]) -> Iterator[Instruction]:
        """The accesses of a loop that lie in none within it, and that no predicate guards."""
        within = set().union(*(other for other in self.loops.values() if other < body))
        return (i for i in self._accesses(body - within) if not i.guarded)

    def _accesses(self, blocks: set[int]) -> Iterator[Instruction]:
        return (i for block in blocks for i in self.blocks[block].instructions if i.kind and not i.word)

    def unordered_signals(self) -> int:
        """Releases of one thread that other threads' stores may still come behind: no barrier between."""
        return self._meets(
            lambda i: i.releases, lambda i: i.barrier, lambda i: i.kind == "store" and not i.releases, backward=True
        )

    def unordered_waits(self) -> int:
        """Acquires of one thread that other threads' accesses may come before: no barrier between."""
        return self._meets(
            lambda i: i.acquires and not i.releases,
            lambda i: i.barrier,
            lambda i: i.kind != "" and not i.word and not i.scalar,
            backward=False,
        )

    def _meets(
        self,
        start: Callable[[Instruction], bool],
        good: Callable[[Instruction], bool],
        bad: Callable[[Instruction], bool],
        *,
        backward: bool,
    ) -> int:
        """From how many instructions a way leads to a bad one without a good one between them."""

        def walk(code: tuple[Instruction, ...]) -> bool | None:
            """Whether it ends badly; None: neither is there."""
            return next((bad(i) for i in (reversed(code) if backward else code) if good(i) or bad(i)), None)

        def ends_badly(at: int, rest: tuple[Instruction, ...]) -> bool:
            verdict = walk(rest)
            if verdict is not None:
                return verdict
            seen, todo = set[int](), [at]
            while todo:
                here = todo.pop()
                for i in set(self.before[here] if backward else self.blocks[here].successors) - seen:
                    seen.add(i)
                    verdict = walk(self.blocks[i].instructions)
                    if verdict:
                        return True
                    if verdict is None:
                        todo.append(i)
            return False

        return sum(
            ends_badly(b, block.instructions[:n] if backward else block.instructions[n + 1 :])
            for b, block in enumerate(self.blocks)
            for n, instruction in enumerate(block.instructions)
            if start(instruction)
        )
