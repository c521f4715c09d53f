"""torchrun's place is taken here: its options, the variables that it sets, and the store in which its ranks meet."""
