"""FTCOMM_ENGINE=gpu-kernel: a kernel runs whole ops, among replicas of one host."""
