"""The admin socket of a running job, by which `ftcomm status`, `restart` and `chaos` speak to its launcher."""
