"""Checks for a machine with a GPU, in five parts of at most ten minutes: docs/servers.md, "GPUs"."""
