"""The flight recorder: each rank writes what its ops and its training do into a ring in a file of fixed size.

The file is in memory (tmpfs) and outlives the rank, so anybody who may read it can do so at any time: while the rank
runs, when it hangs, when it is frozen, and when it is dead.

    layout       the bytes of the file
    recorder     the writer, in the rank
    callers      the line of the script from which an op was called
    place        where the files are, and how long they stay
    reader       `read(path)`: the file as typed data
"""
