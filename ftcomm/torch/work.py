"""A collective that torch has started: `dist.Work` over the Work of a group, and the future that hooks chain on."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work

from ftcomm.errors import CollectiveTimeout
from ftcomm.p2p.calls import MessageWork
from ftcomm.process import callers
from ftcomm.process.own import own_process


class WorkPart(Protocol):
    """The result of a call with `async_op=True`."""

    def wait(self, timeout: float | None = None) -> Any: ...

    def done(self) -> bool: ...


class FtWork(dist._Work):  # type: ignore[misc]
    """One call of torch. It is done when all its `parts` are, and `finish` has brought the result to where torch wants
    it.

    `result` is the value of the future. `timeout` is in seconds from now, for the call: each `wait` raises
    `CollectiveTimeout` when it has passed, whatever the ops beneath do then. All methods from any thread.
    """

    _registered = False
    _error: BaseException | None = None
    _over = False
    _source = -1
    _begun: torch.futures.Future[Any] | None = None  # set at the end, with or without an error
    _future: torch.futures.Future[Any] | None = None  # follows from it
    _step_repeats = False
    raised_elsewhere = False  # then the future gets a value in any case

    def __init__(
        self,
        name: str,
        parts: Sequence[WorkPart],
        result: list[torch.Tensor],
        futures: Futures,
        finish: Callable[[], None] | None = None,
        timeout: float | None = None,
        sequence: int = 0,
    ) -> None:
        super().__init__()
        self._sequence = sequence
        self._name, self._parts, self._result, self._futures = name, parts, result, futures
        self._finish = finish
        self._start = time.monotonic()
        self._end = None if timeout is None else self._start + timeout
        self._lock = threading.Lock()
        if not parts:
            self._settle(None)

    # -- torch's names -----------------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is there; True. Raises what the op failed with."""
        if not self._over:
            own_process()
            self._wait_for_parts(None if timeout is None else timeout.total_seconds())
        if self._registered:
            self._unregister()
        if self._error is not None:
            raise self._error
        return True

    def _wait_for_parts(self, seconds: float | None) -> None:
        end = self._end if not seconds else time.monotonic() + seconds
        for part in self._parts:
            if self._over:
                break
            try:
                part.wait(None if end is None else max(0.0, end - time.monotonic()))
                if isinstance(part, MessageWork) and part.source is not None:
                    self._source = part.source
            except CollectiveTimeout as error:
                if not part.done():
                    raise CollectiveTimeout(
                        f"{self._name} timed out after {time.monotonic() - self._start:.3g} s: it was not done within "
                        f"the timeout of the call. It goes on, and its buffers are not to be touched ({error})"
                    ) from error
                self._settle(error)
            except Exception as error:
                self._settle(error)
        self._settle(None)

    def is_completed(self) -> bool:
        if not self._over and all(part.done() for part in self._parts):
            try:
                self.wait()
            except Exception:
                return True  # exception() returns the error
        return self._over

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._result

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns the future of the result.

        An error comes out of it as a RuntimeError with the type and the text of ours, as torch's futures carry no
        others; `wait` raises ours.
        """
        with self._lock:
            future, first = self._future, self._future is None
            if future is None:
                devices = sorted({x.device for x in self._result if x.is_cuda}, key=str)
                self._begun = torch.futures.Future(devices=devices)
                future = self._future = self._begun.then(self._value)
        if first:
            if self._over:
                self._fulfil()
            else:
                self._futures.later(self)
        return future

    def _get_sequence_number(self) -> int:
        return self._sequence

    def register(self) -> None:
        """Let `wait_tensor` of the tensors wait for this, as a compiled graph does that gets them in flight."""
        self._registered = True
        for x in self._result:
            _register_work(x, self)

    # -- ours --------------------------------------------------------------------------------------------------------

    def _unregister(self) -> None:
        """Take all tensors out of torch's registry of works.

        torch's way is to wait for each tensor, which waits for this work again, and raises its error each time.
        """
        self._registered = False
        for x in self._result:
            with contextlib.suppress(Exception):  # `wait` raises the error later
                torch.ops._c10d_functional.wait_tensor(x)

    def _settle(self, error: BaseException | None) -> None:
        """Settle the work, once. `finish` only copies, and does not wait."""
        with self._lock:
            if self._over:
                return
            if error is None and self._finish is not None:
                try:
                    self._finish()
                except Exception as failed:
                    error = failed
            self._error, self._finish = error, None
            self._over = True

    def raise_error(self) -> None:
        """Raise the error of a finished op, if there is one that the step loop does not handle (see `Futures`)."""
        if self._error is not None and not self._step_repeats:
            raise self._error

    def _fulfil(self) -> None:
        """Give the future its value, at the end."""
        assert self._begun is not None
        self._step_repeats = isinstance(self._error, Exception) and self._futures.repeats_step_after(self._error)
        self._begun.set_result(self._result)

    def _value(self, begun: torch.futures.Future[Any]) -> Any:
        """Returns the value of the future, or raises. A callback of `Future.then` makes an error for C++, too. A future
        by `set_exception` has a value there and an exception only in Python, and DDP's reducer would crash on it."""
        if self._error is None or self._step_repeats or self.raised_elsewhere:
            return begun.value()
        raise self._error


class Futures:
    """The thread of a process group that gives futures their values, in the order of their calls. An op that a callback
    of a future calls gets its value in a thread of its own.

    An error after which the step is repeated (`repeats_step_after`) is left out of the future, which then has the
    inputs: what the step has made of them is discarded.
    """

    def __init__(self, repeats_step_after: Callable[[Exception], bool] = lambda error: False) -> None:
        self.repeats_step_after = repeats_step_after
        self.cut_off = ""  # a call whose future ended by its timeout, before the call
        self._works: queue.SimpleQueue[FtWork | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def later(self, work: FtWork) -> None:
        if getattr(
            callers.chained, "value", False
        ):  # what is called on a value may wait for this one, so not in its thread
            threading.Thread(target=self._end, args=(work,), name="ftcomm-futures-inner", daemon=True).start()
            return
        with self._lock:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="ftcomm-futures", daemon=True)
                self._thread.start()
            closed = self._closed
        if closed:
            self._end(work)
        else:
            self._works.put(work)

    def close(self) -> None:
        """End the thread when the calls under way are done; idempotent. The groups have ended all ops before."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._works.put(None)

    def _run(self) -> None:
        while (work := self._works.get()) is not None:
            self._end(work)
            del work  # keep no buffers of callers while there is nothing to do

    def _end(self, work: FtWork) -> None:
        try:
            work.wait()
        except Exception as error:
            if not all(part.done() for part in work._parts):
                self.cut_off = work._name
            work._settle(error)  # after a timeout of the call
        callers.chained.value = True
        try:
            work._fulfil()
        finally:
            callers.chained.value = False
