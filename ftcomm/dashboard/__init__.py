"""The live view of a job: a page, metrics and a terminal screen, made of what the admin socket answers."""
