"""A script of Accelerate, or of a trainer that has an Accelerator, with the loss scaler of mixed precision "fp16", on
CPUs: scaled_accelerate.py SCRIPT ARGS...

Accelerate makes one on GPUs alone. The scale grows every other step, so that it soon overflows, and updates are
skipped: also float32 does, which CPUs are faster at, when the scale is as high.
"""

from __future__ import annotations

import functools
import runpy
import sys
from typing import Any

import accelerate
import torch
from accelerate.utils import AutocastKwargs

START = 2.0**120
scalers: list[torch.amp.GradScaler] = []
made = accelerate.Accelerator.__init__


@functools.wraps(made)  # whose signature is looked at
def make(self: accelerate.Accelerator, *args: Any, **options: Any) -> None:
    made(self, *args, **options)
    self.state._mixed_precision = "fp16"
    self.native_amp = True
    self.autocast_handler = AutocastKwargs(enabled=False)
    self.scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=2)
    scalers.append(self.scaler)


accelerate.Accelerator.__init__ = make
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
(scaler,) = scalers
assert scaler.get_scale() != START
print(f"scale {scaler.get_scale():g}", flush=True)
