"""what is told about a run: logging, metrics, phases and traces, trackers."""
