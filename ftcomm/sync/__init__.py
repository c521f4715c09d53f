"""Synchronisation by the operating system: futexes, doorbells, robust mutexes, scheduling."""
