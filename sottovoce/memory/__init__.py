"""Where the bytes are and how many there may be: what is here, what it takes, what was decided."""
