"""Composition: roles, training loops, saving, evaluation, recovery."""
