"""Gradients in flat buckets, each reduced as soon as backward has filled it, while backward goes on.

    parameters     embed   block0   block1   head            backward runs from the right to the left
    buckets        [   2   |     1     |    0   ]            so bucket 0 is full, and on its way, first

Every `p.grad` is a view into the flat tensor of its bucket: nothing is packed or unpacked, the all-reduce is in place.
Buckets are launched strictly in their order, whatever order autograd fills them in, because every replica must call
the same ops in the same order.

    buckets = GradientBuckets(model)
    loss.backward()
    buckets.wait()
    optimizer.step()
    buckets.zero_grad()

Several micro-batches a step: backward() of all but the last in `buckets.no_sync()`, which adds up and reduces nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from ftcomm.errors import ArgumentError, FtcommError

if TYPE_CHECKING:
    from ftcomm.groups.calls import Work
    from ftcomm.groups.group import Group

BUCKET_BYTES = 4 << 20


class _Bucket:
    """A flat tensor and the parameters whose gradients lie in it, in the order in which backward fills them."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.flat = torch.zeros(sum(p.numel() for p in params), dtype=params[0].dtype, device=params[0].device)
        pieces = self.flat.split([p.numel() for p in params])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]
        # Indices in `params` of gradients: those that are there, and those that `no_sync` has begun to add up.
        self.filled: set[int] = set()
        self.begun: set[int] = set()
        self.work: Work | None = None

    def take(self, place: int) -> None:
        """Copy the gradient of a parameter in, if it was made outside (after `optimizer.zero_grad()`)."""
        grad, view = self.params[place].grad, self.views[place]
        if grad is not view:
            assert grad is not None, "autograd has just accumulated it"
            view.copy_(grad)
            self.params[place].grad = view

    def fill_rest(self) -> None:
        """Fill in zeros for parameters that took no part in the step."""
        for place, view in enumerate(self.views):
            if place not in self.filled | self.begun:
                view.zero_()
                self.params[place].grad = view

    def end(self) -> None:
        """Forget the step."""
        self.work = None
        self.filled.clear()
        self.begun.clear()


class GradientBuckets:
    """Averages the gradients of `module` over `group` (default: the default group), overlapped with backward.

    bucket_bytes: a bucket is closed at this size; a larger parameter has one of its own.
    op: "avg" (over the replicas that contribute) or "sum".
    compression: as of `Group.allreduce`.

    One backward a step outside of `no_sync`. The parameters that require gradients are taken once, here. It costs one
    copy of the gradients, which `p.grad` shares. Not thread-safe. `wait` raises what an all-reduce raises.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Group | None = None,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        op: str = "avg",
        compression: str | None = None,
    ) -> None:
        if group is None:
            from ftcomm.groups.default_group import default_group

            group = default_group()
        if bucket_bytes < 1:
            raise ArgumentError(f"bucket_bytes={bucket_bytes}; expected at least 1.")
        self._group = group
        self._op = op
        self._compression = compression
        self._buckets = [_Bucket(params) for params in _partition(module, bucket_bytes)]
        self._next = 0  # the bucket to launch next
        self._reduces = True  # outside of no_sync
        for bucket in self._buckets:
            for place, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(lambda _, b=bucket, at=place: self._filled(b, at))
        self.zero_grad()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of each bucket, in the order in which they are reduced."""
        return tuple(bucket.flat.numel() * bucket.flat.element_size() for bucket in self._buckets)

    def zero_grad(self) -> None:
        """Zero all gradients in place, with one fill a bucket. `optimizer.zero_grad()` works as well, at the cost of a
        copy."""
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.begun.clear()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                param.grad = view

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward() adds to the gradients and none is reduced. The backward() of the last
        micro-batch stands outside, and reduces the sums; divide each loss by the number of micro-batches."""
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def wait(self) -> None:
        """Block until every gradient is reduced. Call it between backward and `optimizer.step()`.

        Launches what backward left out, with zeros. Raises what the first failed op raised, after all have ended.
        """
        for bucket in self._buckets[self._next :]:
            bucket.fill_rest()
            self._launch(bucket)
        error: FtcommError | None = None
        for bucket in self._buckets:
            try:
                assert bucket.work is not None
                bucket.work.wait()
            except FtcommError as failed:
                error = error or failed
            bucket.end()
        self._next = 0
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Give the step up: wait for the ops under way, also failed ones, and forget the rest. For a step loop, as
        `on_repeat`."""
        for bucket in self._buckets:
            if bucket.work is not None:
                with contextlib.suppress(FtcommError):
                    bucket.work.wait()
            bucket.end()
        self._next = 0

    def _filled(self, bucket: _Bucket, place: int) -> None:
        if place in bucket.filled:
            raise FtcommError(
                "backward() reached a parameter twice before GradientBuckets.wait(). Call wait() after each backward; "
                "to accumulate several micro-batches, call backward() of all but the last in GradientBuckets.no_sync()."
            )
        bucket.take(place)
        if not self._reduces:
            bucket.begun.add(place)
            return
        bucket.filled.add(place)
        while self._next < len(self._buckets):
            ready = self._buckets[self._next]
            if len(ready.filled) < len(ready.params):
                return
            self._launch(ready)

    def _launch(self, bucket: _Bucket) -> None:
        bucket.work = self._group.allreduce(bucket.flat, self._op, async_op=True, compression=self._compression)
        self._next += 1


def _partition(module: nn.Module, bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Cuts the parameters, in reverse order, into runs of one dtype and device, as backward fills them."""
    done: list[list[nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for name, param in reversed(list(module.named_parameters())):
        if not param.requires_grad:
            continue
        if param.layout != torch.strided:
            raise ArgumentError(f"{name} has the layout {param.layout}; gradient buckets take dense parameters only.")
        bucket = filling.setdefault((param.dtype, param.device), [])
        bucket.append(param)
        if sum(p.numel() * p.element_size() for p in bucket) >= bucket_bytes:
            done.append(filling.pop((param.dtype, param.device)))
    return done + list(filling.values())
