"""Every interleaving of the programs of the all-reduce kernel with their host, by the text of the kernel itself.

The functions of `ftcomm.kernels.device.attempts`, and `_launch`, which calls them, are turned into generators: each
access to a word becomes a `yield`, at which any other may come first. A program is then an automaton: what it does next
follows from where it stands and from its variables. Lanes and the host are played here, as short as they can be.

What a program writes stays in a buffer of its own, from which it comes out in order and late: so loads overtake stores,
but for `add`, `exchange` and a full fence, which are done when the buffer is empty. Loads are done in order: that a
fence is missing between two of them is not found. `read` is of words that do not change meanwhile, and takes no time.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping
from typing import Any, NamedTuple

from ftcomm.kernels.device import allreduce as kernel
from ftcomm.kernels.device import attempts
from ftcomm.kernels.device import words as w

LANES = 2
PLAIN = ("load", "read", "write", "publish", "add", "exchange", "full_fence", "transfer")
CTL, STATE, VIEW, OWN = 0, 1 << 12, 2 << 12, 3 << 12  # addresses; OWN: words that only the test has
QUIET, OTHERS = OWN, OWN + 8  # what the host believes; the last epoch in which the others have come
RAISED = OWN + 16  # the epoch of the flags
NEWS = (w.EPOCH, w.RESUMED, w.TODO_OF)  # words of the table that matter here
UNSEEN = [CTL + 8 * word for word in (w.TEMPLATE, w.BASE_OF, w.STATUS, w.CALLED)] + [STATE + 8 * w.BASE]
EAGER = ("read", "serve", "done")
NOTHING = 0  # template of both launches, and all that is not looked at

Program = Generator[tuple[Any, ...], Any, Any]


class Broken(AssertionError):
    """The kernel has done what it must not."""


# ---- the kernel as automaton ----------------------------------------------------------------------------------------


class _Yields(ast.NodeTransformer):
    """Accesses become yields, and calls of what accesses words are delegated."""

    def __init__(self, inner: set[str]) -> None:
        self.inner = inner

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name):
            return node
        name = node.func.id
        if name in PLAIN:
            return ast.Yield(ast.Tuple([ast.Constant(name), *node.args], ast.Load()))
        return ast.YieldFrom(node) if name in self.inner else node


class _Language:
    """What the kernel takes of Triton's language, with integers."""

    int64 = None

    def __init__(self, program: int, programs: int) -> None:
        self.program_id = lambda axis: program
        self.num_programs = lambda axis: programs
        self.zeros = lambda shape, dtype: 0
        self.cast = lambda value, dtype: value
        self.where = lambda condition, x, y: x if condition else y


def program(which: int, programs: int, change: tuple[str, str]) -> Callable[[], Program]:
    """Program `which` of a launch, in whose text the one is put for the other."""
    functions = [attempts.begin, attempts.join, attempts.leave, attempts.end, attempts.depart, kernel._launch]
    inner = {function.fn.__name__ for function in functions} | {"_serve", "raise_flags"}
    scope: dict[str, Any] = {}
    for module in (attempts, kernel):
        for name, value in vars(module).items():
            scope[name] = getattr(value, "value", value)  # of constants that are compiled in
    scope.update(tl=_Language(which, programs), fence=lambda: None, rest=lambda: None, clock=lambda threads: 0)
    for function in functions:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function.fn)).replace(*change))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list = []
        for argument in definition.args.args:
            argument.annotation = None
        tree = _Yields(inner).visit(tree)
        exec(compile(ast.fix_missing_locations(tree), function.fn.__name__, "exec"), scope)
    scope.update(_serve=_serve, raise_flags=_raise)
    arguments = dict.fromkeys(inspect.signature(kernel._launch.fn).parameters, NOTHING)
    arguments.update(ctl=CTL, state=STATE, view=VIEW)
    return lambda: scope["_launch"](**arguments)


def _raise(view: int, epoch: int, lanes: int) -> Program:
    yield "write", RAISED, epoch


def _serve(ctl: int, state: int, view: int, *arguments: Any) -> Program:
    """Each lane changes memory, waits for the others, and is through."""
    epoch = arguments[5]
    if (yield "read", view + 8 * w.EPOCH) != epoch:
        raise Broken("the table of members is that of another epoch")
    number = yield "read", state + 8 * w.NUMBER
    todo = yield "read", view + 8 * w.TODO_OF
    if (todo == number + 1) != (yield "serve", number, epoch):
        raise Broken("it takes the tasks of another op, or all of one that was begun before")
    done, status = 0, w.RUNNING
    if (yield "load", ctl + 8 * w.OPEN) != epoch:
        status = w.ABORTED
    lane = yield "add", state + 8 * w.NEXT, 1
    while lane < LANES and status == w.RUNNING:
        if (yield "read", RAISED) != epoch:
            raise Broken("bytes change before the flags are raised")
        yield "touch", number, epoch, lane
        while status == w.RUNNING and (yield "load", OTHERS) != epoch:
            if (yield "load", ctl + 8 * w.OPEN) != epoch:
                status = w.ABORTED
        if status == w.RUNNING:
            done += 1
            yield "done", number, epoch, lane
            lane = yield "add", state + 8 * w.NEXT, 1
    return LANES, 1, done, status


class Automaton:
    """States of a program, by number, as far as they were reached. A state knows by which answers it is reached."""

    def __init__(self, start: Callable[[], Program]) -> None:
        self._start = start
        self._numbers: dict[Hashable, int] = {}
        self._answers: list[tuple[Any, ...]] = []
        self.requests: list[tuple[Any, ...] | None] = []  # None: it has ended
        self._next: dict[tuple[int, Any], int] = {}
        self.first = self._state(())

    def after(self, state: int, answer: Any) -> int:
        if (state, answer) not in self._next:
            self._next[state, answer] = self._state((*self._answers[state], answer))
        return self._next[state, answer]

    def _state(self, answers: tuple[Any, ...]) -> int:
        running = self._start()
        request: tuple[Any, ...] | None = None
        try:
            request = next(running)
            for answer in answers:
                request = running.send(answer)
        except StopIteration:
            request = None
        frames: list[Hashable] = [request]
        inner: Any = running
        while request is not None and inner is not None:
            frame = inner.gi_frame
            frames.append((frame.f_code.co_name, frame.f_lasti, tuple(sorted(_plain(frame.f_locals)))))
            inner = inner.gi_yieldfrom
        number = self._numbers.setdefault(tuple(frames), len(self.requests))
        if number == len(self.requests):
            self.requests.append(request)
            self._answers.append(answers)
        return number


def _plain(variables: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(name, int(value)) for name, value in variables.items() if isinstance(value, int)]


# ---- the host -------------------------------------------------------------------------------------------------------


def host(epochs: int, launches: int, close: bool) -> Callable[[], Program]:
    """Frozen at first. It enters one epoch after the other, with an op that was broken off to go on, or to have
    returned elsewhere; in the last the others come. With `close` it ends the engine in that."""

    def run() -> Program:
        returned = 0
        for epoch in range(1, epochs + 1):
            while True:
                (begun,) = yield "load", CTL + 8 * w.BEGUN
                (finished,) = yield "load", CTL + 8 * w.FINISHED
                if begun == finished:
                    break
            yield "write", (QUIET, 1)
            returned, started = yield "load", CTL + 8 * w.RETURNED, CTL + 8 * w.STARTED
            left = started > returned
            if left and (yield ("choose",)):
                returned, left = returned + 1, False
            news = zip(NEWS, (epoch, returned, returned + 1 if left else 0), strict=True)
            yield (
                "write",
                *((CTL + 8 * (w.NEWS + word), value) for word, value in news),
                (CTL + 8 * w.RETURNED, returned),
            )
            yield "write", (QUIET, 0), (CTL + 8 * w.OPEN, epoch)
            if (yield ("choose",)) or (epoch == epochs and not close):
                yield "write", (OTHERS, epoch)
            if epoch < epochs:
                yield "write", (CTL + 8 * w.OPEN, 0)
            elif close:
                yield "write", (CTL + 8 * w.OPEN, w.CLOSED)

    return run


# ---- all of it ------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    memory: tuple[tuple[int, int], ...]  # (address, value) of words that are not 0
    launch: int
    programs: tuple[int, ...]
    buffers: tuple[tuple[tuple[int, int], ...], ...]  # (address, value)
    host: int
    past: frozenset[tuple[Any, ...]]  # (what, number, epoch, lane) of lanes, and (what, number, epoch)


class Explored(NamedTuple):
    states: int
    ends: int


def explore(
    programs: int, launches: int, epochs: int, *, close: bool = False, change: tuple[str, str] = ("", "")
) -> Explored:
    """Go through all states; `change` is made in the text of the kernel. Raises `Broken`, with the shortest way to what
    is wrong."""
    automata = [Automaton(program(which, programs, change)) for which in range(programs)]
    outside = Automaton(host(epochs, launches, close))
    idle = tuple(automaton.first for automaton in automata)
    first = State((), 0, idle, ((),) * programs, outside.first, frozenset())
    came: dict[State, State | None] = {first: None}
    before: dict[State, list[State]] = {}
    ends, ahead = [], deque([first])
    while ahead:
        state = ahead.popleft()
        try:
            following = list(_following(state, automata, outside, launches, idle))
            if not following:
                _check_end(state, launches, close)
                ends.append(state)
        except Broken as broken:
            raise Broken(f"{broken}\n{_history(state, came, automata, outside)}") from None
        for after in following:
            before.setdefault(after, []).append(state)
            if after not in came:
                came[after] = state
                ahead.append(after)
    good, ahead = set(ends), deque(ends)
    while ahead:
        for state in before.get(ahead.popleft(), ()):
            if state not in good:
                good.add(state)
                ahead.append(state)
    if stuck := next((state for state in came if state not in good), None):
        raise Broken(f"it never ends\n{_history(stuck, came, automata, outside)}")
    return Explored(len(came), len(ends))


def _following(
    state: State, automata: list[Automaton], outside: Automaton, launches: int, idle: tuple[int, ...]
) -> Generator[State, None, None]:
    memory = dict(state.memory)
    request = outside.requests[state.host]
    if request is not None:
        kind, *arguments = request
        answers: list[Any] = [None]
        changed = state.memory
        if kind == "load":
            answers = [tuple(memory.get(address, 0) for address in arguments)]
        elif kind == "choose":
            answers = [False, True]
        else:
            changed = _with(memory, *arguments)
        for answer in answers:
            yield state._replace(memory=changed, host=outside.after(state.host, answer))
    if state.launch == launches:
        return
    if all(automata[i].requests[at] is None and not state.buffers[i] for i, at in enumerate(state.programs)):
        yield state._replace(launch=state.launch + 1, programs=idle, past=frozenset())
        return
    for i, automaton in enumerate(automata):
        buffer = state.buffers[i]
        if buffer:
            address, value = buffer[0]
            if address == CTL + 8 * w.RETURNED:
                _check_return(state, value - 1)
            yield state._replace(memory=_with(memory, buffer[0]), buffers=_put(state.buffers, i, buffer[1:]))
        after = _step(state, automaton, i)
        while after is not None and (automaton.requests[after.programs[i]] or ("end",))[0] in EAGER:
            after = _step(after, automaton, i)
        if after is not None:
            yield after


def _step(state: State, automaton: Automaton, i: int) -> State | None:
    """The next access of program `i`; None if there is none, or not yet."""
    request, buffer, past = automaton.requests[state.programs[i]], state.buffers[i], state.past
    if request is None:
        return None
    memory, seen = dict(state.memory), state.memory
    kind, *arguments = request
    answer: Any = None
    if kind in ("load", "read"):
        own = [value for address, value in buffer if address == arguments[0]]
        answer = own[-1] if own else memory.get(arguments[0], 0)
    elif kind in ("write", "publish"):
        if arguments[0] not in UNSEEN:
            buffer = (*buffer, (arguments[0], int(arguments[1])))
    elif kind == "transfer":
        if memory.get(QUIET):
            raise Broken("the table of members is read while the host writes it")
        for word in NEWS:
            buffer = (*buffer, (arguments[1] + 8 * word, memory.get(arguments[0] + 8 * word, 0)))
    elif kind == "serve":
        number, epoch = arguments
        answer = any(each[:2] == ("serve", number) and each[2] < epoch for each in past)
        past = past | {request}
    elif kind in ("touch", "done"):
        if memory.get(QUIET):
            raise Broken("memory is touched while the host believes that nothing runs")
        if request in past:
            raise Broken("two programs serve one lane")
        past = past | {request}
    elif buffer:
        return None  # add, exchange and a full fence come when all before them can be seen
    elif kind != "full_fence":
        answer = memory.get(arguments[0], 0)
        value = answer + arguments[1] if kind == "add" else arguments[1]
        seen = _with(memory, (arguments[0], value))
    programs = _put(state.programs, i, automaton.after(state.programs[i], answer))
    buffers = state.buffers if buffer is state.buffers[i] else _put(state.buffers, i, buffer)
    return State(seen, state.launch, programs, buffers, state.host, past)  # `_replace` takes three times as long


def _put(values: tuple[Any, ...], i: int, value: Any) -> tuple[Any, ...]:
    return (*values[:i], value, *values[i + 1 :])


def _with(memory: Mapping[int, int], *written: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted((address, value) for address, value in {**memory, **dict(written)}.items() if value))


def _check_return(state: State, number: int) -> None:
    done = [each[2] for each in state.past if each[:2] == ("done", number)]
    if all(done.count(epoch) < LANES for epoch in done) or not done:
        raise Broken("an op has returned of which a lane is not through")


def _check_end(state: State, launches: int, close: bool) -> None:
    memory = dict(state.memory)
    if state.launch < launches:
        raise Broken("nothing can go on")
    left = [word for word in (w.NOW, w.INSIDE, w.LEFT) if memory.get(STATE + 8 * word)]
    if left:
        raise Broken(f"words {left} are not set back for the next launch")
    if not close and memory.get(CTL + 8 * w.RETURNED) != launches:
        raise Broken("ops were not counted as they have returned")


def _history(
    state: State | None, came: Mapping[State, State | None], automata: list[Automaton], outside: Automaton
) -> str:
    """What each has done on the way to `state`."""
    lines: list[str] = []
    while state is not None and (before := came[state]) is not None:
        if state.host != before.host:
            lines.append(f"host      {outside.requests[before.host]}")
        elif state.launch != before.launch:
            lines.append("the next launch")
        else:
            for i, automaton in enumerate(automata):
                if state.programs[i] != before.programs[i]:
                    lines.append(f"program {i} {automaton.requests[before.programs[i]]}")
                elif state.buffers[i] != before.buffers[i]:
                    out = [each for each in before.buffers[i] if each not in state.buffers[i]]
                    lines.append(f"program {i}     seen by others: {out}")
        state = before
    return "\n".join(reversed(lines))
