"""The admin socket of a running job. `ftcomm status`, `restart` and `chaos` use it to speak to the launcher."""
