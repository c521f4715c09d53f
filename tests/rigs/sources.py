"""The sources of the product, parsed once in each process, for tests that read them."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("ftcomm", "control", "kernels", "bench")


def files(*folders: str) -> list[Path]:
    return sorted(file for folder in folders or FOLDERS for file in (ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(file: Path) -> ast.Module:
    """Not to be changed by who reads it. Nothing of it is garbage, and to look for some takes three times as long as to
    parse."""
    gc.disable()
    try:
        return ast.parse(file.read_text())
    finally:
        gc.enable()


@functools.cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All of `file`, in the order of `ast.walk`."""
    return tuple(ast.walk(parsed(file)))


def kept() -> int:
    """How many results of both there are."""
    return parsed.cache_info().currsize + nodes.cache_info().currsize


def name(expression: ast.expr) -> str:
    """`a.b.c` of a name and its attributes, as `ast.unparse` writes it, which takes long; of anything else, what stands
    behind its last dot, with a dot, or ""."""
    if isinstance(expression, ast.Name):
        return expression.id
    return f"{name(expression.value)}.{expression.attr}" if isinstance(expression, ast.Attribute) else ""
