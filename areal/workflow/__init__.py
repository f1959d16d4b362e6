"""Owns the built-in workflows."""
