"""Frames of codes to 24 kHz samples and back. Knows no requests, no batching policy and no files."""
