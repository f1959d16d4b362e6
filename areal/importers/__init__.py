"""Configurations of other systems, translated into ours: every key of the source is classified.

Start with `draft.py`. A file or script of another system enters; a configuration and a report leave.
"""
