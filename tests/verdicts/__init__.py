"""Provokes stalls in real jobs, and compares the verdicts of the launcher with what was provoked.

kinds      what is provoked, and which verdict is right
acts       what the ranks do, in a job
provoke    a job, in which one stall follows the other, and what was said of each
"""
