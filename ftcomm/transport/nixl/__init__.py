"""Peers reached by NIXL: what they publish is put into mirrors of their segments by RDMA."""
