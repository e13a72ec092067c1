"""Text before the model: languages, pieces of bounded length, token ids. Knows no torch, no audio and no voices."""
