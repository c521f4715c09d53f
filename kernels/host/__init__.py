"""The kernels on host memory: NumPy and torch."""
