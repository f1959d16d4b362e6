"""Owns the composition: roles, training loops, saving, evaluation, recovery."""
