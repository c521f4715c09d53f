"""Suites that others have written, run against ftcomm beside gloo: `make test-upstream`."""
