"""The finishes of replicas, as a coordinator stores them for the one that comes after it. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ftcomm.control import field_types as t
from ftcomm.control.decode import learn


class Finishes(msgspec.Struct, frozen=True):
    """The replicas that have finished, as far as is known in the view of `epoch`."""

    epoch: t.Epoch = 0
    lives: Annotated[tuple[tuple[t.ReplicaNumber, t.Name], ...], t.MANY] = ()  # among the members of the views in force
    completed: t.ReplicaNumbers = ()  # replicas: the training is complete there


learn(Finishes)

NO_FINISHES = Finishes()
