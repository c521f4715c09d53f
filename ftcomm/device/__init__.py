"""The engine that runs the all-reduce kernel: on a GPU, or, for tests, in Triton's interpreter."""
