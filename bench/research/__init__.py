"""Experiments beside the library: what disturbed trainings learn, a simulated fleet, and the page of all results."""
