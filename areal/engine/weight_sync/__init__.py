"""Owns the ways weights travel from trainer to servers."""
