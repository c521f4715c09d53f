"""A word tells an epoch, and how far its owner has come in it: `epoch << COUNTER | count`, a positive int64.

An epoch is a view, of which a training that loses a replica every 18 minutes has some 90,000 a year; a count is one of
tasks, of which the smallest ops make 200,000 a second. So epochs last for 20 years, and the counts of one epoch, in
which nothing is ever lost or joins, for 250 days; who comes to the end of either is told so (`Stream`, `Coordinator`).
"""

from __future__ import annotations

COUNTER = 42  # bits
COUNTS = 1 << COUNTER  # counts are below it
EPOCHS = 1 << 63 - COUNTER  # and epochs below this, from 1 on
