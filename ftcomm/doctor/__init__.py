"""`ftcomm doctor`: what of ftcomm can work on this machine, what cannot, and what mends it."""
