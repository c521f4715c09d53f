"""The production state machines under virtual time and a simulated network, and an exhaustive check of small groups."""
