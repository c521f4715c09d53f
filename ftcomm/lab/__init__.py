"""The laboratory: what tests ftcomm and what shows it. Nothing that a user imports imports it."""
