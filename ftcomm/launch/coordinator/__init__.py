"""Three homes of the coordinator: a command of its own, the launcher's event loop, and a process beside torchrun."""
