"""Finds what happened to a job and what it cost: causes, prices, the state of each rank, and a history that stays."""
