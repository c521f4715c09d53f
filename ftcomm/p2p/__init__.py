"""Sends arrays from one rank to another: send and recv."""
