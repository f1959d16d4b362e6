"""Observation of a run: logging, metrics, phases, traces, trackers."""
