"""Configurations of other systems, translated into ours: every key of the source is classified."""
