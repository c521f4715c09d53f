"""The engines that run the ops of a group: this process, this process with a GPU that reduces, a kernel on a GPU."""
