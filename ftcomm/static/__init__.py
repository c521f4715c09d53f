"""Groups whose members never change: the ranks of a replica, any ranks of a job, worlds that c10d reconfigures."""
