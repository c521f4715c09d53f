"""Groups whose members never change: the ranks of a replica, subgroups, worlds that c10d reconfigures."""
