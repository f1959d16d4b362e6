"""Datasets, prompts, packing and balancing of sequences."""
