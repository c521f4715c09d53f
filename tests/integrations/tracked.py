"""A script for Accelerate, with a tracker that notes what it is told: tracked.py SCRIPT ARGS...

What accelerate decorates with `on_main_process` runs in every world of one, and each replica is one.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any, TextIO

from accelerate.tracking import GeneralTracker, on_main_process

from ftcomm.integrations.accelerate import Accelerator


class Tracker(GeneralTracker):
    name = "notes"
    requires_logging_directory = False

    @property
    def tracker(self) -> TextIO:
        return self.file

    @on_main_process
    def start(self) -> None:
        self.file = (Path(os.environ["NOTES"]) / f"tracked-{os.environ['FTCOMM_REPLICA']}").open("a", buffering=1)
        print("start", file=self.file)

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        print("config", values["width"], file=self.file)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None, **rest: Any) -> None:
        print("log", step, file=self.file)

    @on_main_process
    def finish(self) -> None:
        print("finish", file=self.file)
        self.file.close()


made = Accelerator.__init__


def make(self: Accelerator, *args: Any, **options: Any) -> None:
    made(self, *args, log_with=Tracker(), **options)
    self.init_trackers("text", {"width": 32})


Accelerator.__init__ = make
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
