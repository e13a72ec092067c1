"""Sound in and out: files, bytes and arrays to float32 mono, and back. Knows no torch, no model and no text."""
