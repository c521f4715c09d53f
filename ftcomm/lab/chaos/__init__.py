"""`ftcomm chaos`: faults against a running job, and a report of what became of it."""
