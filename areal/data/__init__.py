"""Datasets, conversations and chat templates, images, packing and balancing of sequences.

Start with `dataset.py`. Files of rows enter; rendered prompts, and token tables that are packed and split, leave.
"""
