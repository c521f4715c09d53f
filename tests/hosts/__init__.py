"""Jobs on several hosts of this machine: networks of the kernel, and one with a delay, that are cut under them."""
