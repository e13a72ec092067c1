"""Sottovoce."""
