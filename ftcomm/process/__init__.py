"""This process: its threads and what they call, its forked children, its open files, and how its script ends."""
