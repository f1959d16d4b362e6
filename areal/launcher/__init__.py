"""The start of a run: configuration to launch plan to processes. Never imports torch."""
