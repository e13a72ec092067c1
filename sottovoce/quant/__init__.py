"""Weights in fewer bits: values found, layers swapped, checkpoints rewritten, and how far a model moves by it."""
