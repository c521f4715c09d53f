"""FTCOMM_ENGINE=gpu-reduce: the host drives all ops, as with `host`, and a kernel reduces what has come."""
