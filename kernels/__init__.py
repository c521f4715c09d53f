"""Memory operations: reduce, code as fp8, signal and wait; on the host, in Triton, or both ways to the same bits.

Importing this imports neither torch nor Triton.
"""
