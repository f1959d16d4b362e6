"""Owns the start of a run: config to launch plan to processes. No torch."""
