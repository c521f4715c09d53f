"""The launchers of several hosts that start one job together, and what they tell each other."""
