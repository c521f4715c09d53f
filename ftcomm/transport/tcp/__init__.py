"""Peers reached by TCP: what they publish is pushed into mirrors of their segments."""
