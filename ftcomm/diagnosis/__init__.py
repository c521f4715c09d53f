"""Says why a job stands still, or who makes it slow: facts of all ranks in, one verdict out.

stacks       where the threads of a rank stand, read from another process
processes    what the kernel says of a process
facts        all that is known of a job at one moment, as typed data
verdict      facts -> verdict, pure
causes       the kinds of verdicts, with what is to be done
slowdown     who makes the others wait, over the last minutes, pure
collect      facts from the recordings, sockets and /proc of this host
"""
