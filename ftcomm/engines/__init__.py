"""The engines, which run the ops of a group: this process, this process with a GPU that reduces, or a kernel on a GPU."""
