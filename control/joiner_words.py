"""What the coordinator tells replicas that wait to join: for what they wait, or that they need not."""

from __future__ import annotations

from ftcomm.control import messages as m

WAITS = m.Queued(
    "joins at the next step boundary that all replicas can agree on (ftcomm.steps, Group.boundary)", m.Stage.JOINING
)
ALONE = m.Queued(
    "waits for the replicas that hold the state of the training, of which none is heard; if they have ended for good, "
    "end this coordinator, remove its store, and start the job again from its last checkpoint"
)
MUTE = m.Queued(
    "waits for the replicas that hold the state of the training: they live, and none has said a word for longer than "
    "FTCOMM_OP_TIMEOUT. They hold their interpreter locks, or are stopped; continue or end them"
)
FINISHED = m.Expelled("the job has finished", m.Ending.TOO_LATE)
OVER = m.Expelled("the job has ended or is being drained", m.Ending.TOO_LATE)
DRAINED = "the job is being drained"
