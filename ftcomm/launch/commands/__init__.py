"""Commands that look at a running job and change it, and what the options of all commands share."""
