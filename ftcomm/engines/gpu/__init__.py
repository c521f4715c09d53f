"""What both GPU engines take of a GPU: driver, pinned memory; or, for tests, of Triton's interpreter in its place."""
