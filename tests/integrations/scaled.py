"""A script of Lightning with the loss scaler of precision "16-mixed", on CPUs: scaled.py SCRIPT ARGS...

Lightning takes bf16 for that on CPUs, unless it is given the plug-in that it makes on GPUs. The scale grows every other
step, so that it soon overflows, and updates are skipped.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision

START = 2.0**10


class Trainer(lightning.Trainer):  # type: ignore[misc]
    def __init__(self, **options: Any) -> None:
        self.loss_scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=2)
        precision = MixedPrecision("16-mixed", "cpu", self.loss_scaler)
        super().__init__(plugins=[precision], **{**options, "accelerator": "cpu"})

    def fit(self, *args: Any, **options: Any) -> None:
        super().fit(*args, **options)
        assert self.loss_scaler.get_scale() != START
        print(f"scale {self.loss_scaler.get_scale():g}", flush=True)


lightning.Trainer = Trainer
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
