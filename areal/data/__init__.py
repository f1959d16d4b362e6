"""Owns datasets, prompts and packing."""
