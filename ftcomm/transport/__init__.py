"""Transports make a peer's segment reachable: shared memory on one host, TCP elsewhere."""
