"""Parts that tests share: what they drive, what they compare with, and what they start."""
