"""Names and docstrings that a stranger can read: one name for one thing, words of the field, main clauses."""

from __future__ import annotations

import ast
import importlib
import io
import re
import textwrap
import tokenize
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.rigs.sources import FOLDERS, ROOT, files, parsed

# Words that only their author knew. Each thing has the name that NCCL, MPI, raft or the kernel's documents give to it.
_GONE = """
    beast beside bury crowd diary doze expel expelled expels express forgives gambler givers hearsay impatient
    insides keeper knock knocks likeness lobby neighbours nudge parcel parcels pardon patience patient patiently
    poke pulse reckon seat seats sought spare spared switchboard urgent wound wounds yardstick
"""
GONE = frozenset(_GONE.split())
# How a docstring does not begin: it says what something is or does, not of what, by whom or when, and of what it speaks
# before it says "it".
_NO_MAIN_CLAUSE = """
    After Again Also Among As At Before Beside Between Both By For From Here How If In Into It Its Likewise Mostly
    Nobody None Not Nothing Now Of On Once Only Over Same Since Still Such Than That Their Then There They Those
    Through To Under Until Upon What Whatever When Where Which While Who Whoever Whom Whose Why With Within Without
"""
NO_MAIN_CLAUSE = frozenset(_NO_MAIN_CLAUSE.split())
# How a comment does not begin: with somebody whom only its author knows.
NO_NOUN = frozenset(("likewise", "nobody", "somebody", "who", "whoever", "whom", "whose"))
# `View`, `_View` and `T`, but not `LIMIT`.
TYPE_NAME = re.compile(r"_?[A-Z](?:[A-Za-z0-9]*[a-z][A-Za-z0-9]*)?")
OF_NAMED_TUPLES = frozenset(("_asdict", "_fields", "_make", "_replace"))

# Where all that goes between processes is a message. Words are memory.
OF_MESSAGES = (
    "control",
    "ftcomm/launch",
    "ftcomm/membership",
    "ftcomm/groups",
    "ftcomm/diagnosis",
    "ftcomm/monitoring",
)

folders = pytest.mark.parametrize("folder", FOLDERS)


def modules(*folders: str) -> dict[str, ast.Module]:
    """Of these folders, or all."""
    return {str(file.relative_to(ROOT)): parsed(file) for file in files(*folders)}


def identifiers(module: ast.Module) -> Iterator[tuple[int, str]]:
    """All names that `module` gives to something."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def words(name: str) -> list[str]:
    """`sendRTS`, `send_rts` and `SendRts` are two words each."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name).lower())


def docstrings(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said:
                yield getattr(node, "lineno", 1), said


def of_types(module: ast.Module) -> Iterator[tuple[int, str]]:
    """The classes, aliases, types of `NewType` and type variables that `module` defines at its top."""

    def of(nodes: list[ast.stmt]) -> Iterator[tuple[int, str]]:
        for node in nodes:
            targets: list[ast.expr] = []
            if isinstance(node, ast.ClassDef):
                yield node.lineno, node.name
            elif isinstance(node, ast.Assign):
                targets = node.targets
            elif isinstance(node, ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.If | ast.Try):
                yield from of([*node.body, *node.orelse])
            for target in targets:
                if isinstance(target, ast.Name) and TYPE_NAME.fullmatch(target.id):
                    yield node.lineno, target.id

    yield from of(module.body)


def test_types_are_seen_however_they_are_defined() -> None:
    source = """
        class A: ...
        if TYPE_CHECKING:
            Alias: TypeAlias = int
        _Pair = tuple[int, int]
        Named = NewType("Named", int)
        T = TypeVar("T")
        LIMIT, RATE_ = 2, 3
        log = get()
        def inner(): Local = int
    """
    assert [name for _, name in of_types(ast.parse(textwrap.dedent(source)))] == ["A", "Alias", "_Pair", "Named", "T"]


def test_no_type_has_the_name_of_another() -> None:
    found = defaultdict(list)
    for file, module in modules().items():
        for line, name in of_types(module):
            found[name].append(f"{file}:{line}")
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert not twice, "each name means one thing: choose another"


def test_actions_are_frozen_structs() -> None:
    aliases = {name: file for file, module in modules().items() for _, name in of_types(module)}
    of_machines = [name for name in aliases if name.endswith("Action")]
    assert {"CoordinatorAction", "RankAction", "DerivedAction", "MessageAction"} <= set(of_machines)
    for name in of_machines:
        file = Path(aliases[name]).with_suffix("")
        module = ".".join(file.parts if file.parts[0] == "ftcomm" else ("ftcomm", *file.parts))
        for kind in typing.get_args(getattr(importlib.import_module(module), name)):
            assert issubclass(kind, msgspec.Struct), kind
            assert kind.__struct_config__.frozen, kind


@folders
def test_words_that_only_their_author_knew_are_gone(folder: str) -> None:
    found = [
        f"{file}:{line}: {name}"
        for file, module in modules(folder).items()
        for line, name in [*identifiers(module), *((1, part) for part in Path(file).with_suffix("").parts)]
        if GONE.intersection(words(name))
    ]
    assert not found, "use the word of the field, see docs/glossary.md"


@pytest.mark.parametrize("folder", OF_MESSAGES)
def test_a_message_is_no_word(folder: str) -> None:
    found = [
        f"{file}:{line}: {name}"
        for file, module in modules(folder).items()
        for line, name in [*identifiers(module), *((1, part) for part in Path(file).with_suffix("").parts)]
        if {"word", "words"}.intersection(words(name))
    ]
    assert not found, "a word is memory, see docs/glossary.md: this is a message, a report or a text"


@folders
def test_docstrings_begin_with_a_main_clause(folder: str) -> None:
    found = [
        f"{file}:{line}: {said.splitlines()[0]}"
        for file, module in modules(folder).items()
        for line, said in docstrings(module)
        if said.split()[0].strip(",.:;`") in NO_MAIN_CLAUSE
    ]
    assert not found, "say what it is or does first: a noun or a verb"


def comments(file: Path) -> Iterator[tuple[int, str]]:
    """The comments of `file`, the lines of one as one."""
    below = -1
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            alone = not token.line[:column].strip()
            if not (alone and line == below):
                yield line, token.string.lstrip("#! ")
            below = line + 1 if alone else -1


@folders
def test_comments_begin_with_what_they_speak_of(folder: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {said}"
        for file in files(folder)
        for line, said in comments(file)
        if said and said.split()[0].lower().strip(",.:;`") in NO_NOUN
    ]
    assert not found, "name it: a member, a replica, a process, a reader"


def ranks_by_shard(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that call the index of a rank inside its replica a rank."""
    for node in ast.walk(module):
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
            text = node.value
        if re.search(
            r"\brank \{[^}]*shard|replica (\{[^}]*\}|%\w|\d+),? rank\b|rank (\{[^}]*\}|%\w|\d+) of replica", text
        ):
            yield node.lineno, text


def test_a_text_that_calls_a_shard_a_rank_is_seen() -> None:
    wrong = (
        'f"its rank {self.shard} is lost"',
        'f"replica {r} rank {i}: no"',
        '"replica %d rank %d"',
        'f"rank {i} of replica 1"',
    )
    right = ('f"rank {i} (replica {r} shard {s})"', 'f"rank {group.rank}"', '"the ranks of replica 1"')
    seen = {text for text in (*wrong, *right) if any(ranks_by_shard(ast.parse(text)))}
    assert seen == set(wrong)


@folders
def test_a_rank_with_a_number_is_the_global_one(folder: str) -> None:
    found = [
        f"{file}:{line}: {text}" for file, module in modules(folder).items() for line, text in ranks_by_shard(module)
    ]
    assert not found, "torchrun and Slurm count ranks over the job: see ftcomm.control.rank_name"


def root_of(node: ast.expr) -> str | None:
    """`x` of `x.y(...)[i].z`."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def imported_of_others(module: ast.Module) -> set[str]:
    """Names that `module` imports from what is not ours."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names if "ftcomm" not in alias.name}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("ftcomm"):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def made_by_others(function: ast.FunctionDef | ast.AsyncFunctionDef, theirs: set[str]) -> set[str]:
    """Names that in `function` are of a class of `theirs`: arguments that say so, and what a call of it returns."""
    found = {
        arg.arg
        for arg in ast.walk(function.args)
        if isinstance(arg, ast.arg) and arg.annotation is not None and root_of(arg.annotation) in theirs
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and root_of(node.value) in theirs:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def names_within(module: ast.Module) -> set[str]:
    """Names that classes and functions of `module` define, so that their own module may use them."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_itself(node):
            found.add(node.attr)
    return found


def of_itself(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def reaches_inside(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Accesses to `x._name`, where `x` is neither `self` nor of this module, nor of a library that is not ours."""
    own = names_within(module) | OF_NAMED_TUPLES

    def is_inner(node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute) or not re.match("_[a-zA-Z]", node.attr):
            return False
        return node.attr not in own and not of_itself(node)

    def within(node: ast.AST, theirs: set[str]) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            theirs = theirs | made_by_others(node, theirs)
        elif isinstance(node, ast.Attribute) and is_inner(node) and root_of(node.value) not in theirs:
            yield node.lineno, node.attr
        for child in ast.iter_child_nodes(node):
            yield from within(child, theirs)

    if any(map(is_inner, ast.walk(module))):  # in most there is none, and to look whose it is takes long
        yield from within(module, imported_of_others(module))


def test_nobody_reaches_inside_the_class_of_another_module() -> None:
    found = [
        f"{file}:{line}: {attribute}"
        for file, module in modules().items()
        for line, attribute in reaches_inside(module)
    ]
    assert not found, "give it a name without an underscore where it belongs, or pass what is needed"


# Texts of other programs, which give no other sign: torch's store, etcd's gateway, and Python without another thread.
TEXTS_OF_OTHERS = ("ftcomm/torch/rendezvous.py", "control/etcd.py", "control/failed_dials.py")


REASONS = ("reason", "why", "said", "error", "exc", "news")


def is_reason(node: ast.expr) -> bool:
    """Whether `node` is a text that says why: `why`, `x.reason`, `str(error)`, `event.get("reason")`."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name):
            return node.func.id in ("str", "repr") and any(map(is_reason, node.args))
        return ast.unparse(node.func).endswith(".get") and getattr(node.args[0], "value", "") in REASONS
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")) in REASONS


# Of texts and of patterns: how a reason is read, whatever is looked for in it.
READERS = ("search", "match", "fullmatch", "findall", "finditer", "find", "index", "count")


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value != ""


def is_named_text(node: ast.expr) -> bool:
    """Whether `node` is a text or the name of a constant: `"silent"`, `SILENT`."""
    return is_text(node) or (isinstance(node, ast.Name) and node.id.isupper())


def compared_texts(module: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(module):
        sides, read = list[ast.expr](), False
        if isinstance(node, ast.Compare):
            by_value = isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn)
            sides = [node.left, *node.comparators] if by_value else []
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            read = node.func.attr in READERS
            sides = [node.func.value, *node.args] if read or node.func.attr in ("startswith", "endswith") else []
        if any(map(is_reason, sides)) and (read or any(map(is_named_text, sides))):
            yield node.lineno, ast.unparse(node)


def test_a_reading_of_a_reason_is_seen() -> None:
    read = (
        "'x' in str(error)",
        "X in why",
        "why == 'x'",
        "event.get('reason').startswith(X)",
        "X.search(found.reason)",
    )
    told = ("why == ''", "error is None", "kind == 'x'", "say(reason)", "why in told", "said >= X", "X.search(line)")
    seen = {text for text in (*read, *told) if any(compared_texts(ast.parse(text)))}
    assert seen == set(read)


def test_no_decision_hangs_on_the_words_of_a_reason() -> None:
    found = [
        f"{file}:{line}: {text}"
        for file, module in modules().items()
        if file.startswith(("ftcomm/", "control/", "bench/")) and file not in TEXTS_OF_OTHERS
        for line, text in compared_texts(module)
    ]
    assert not found, "tell it by a type, an enum or a field: texts are for people"
