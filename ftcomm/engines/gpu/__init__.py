"""The parts that both GPU engines share: driver, pinned memory; or, for tests, of Triton's interpreter in its place."""
