"""Trainers of other libraries as replicas of a job: each file is for one library, and is imported by its name alone."""
