"""How good, how fast, how large: measurements of a whole model, as a user would see it."""
