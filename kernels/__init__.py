"""Memory operations: reduce, signal and wait. Each takes plain arrays and words and knows nothing of groups."""
