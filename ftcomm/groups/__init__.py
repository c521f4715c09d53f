"""Groups of ranks and their calls: the job's group, subgroups, and static groups, whose members never change."""
