"""The control plane: who takes part, since which step, until when to wait. Pure state machines and their runtime."""
