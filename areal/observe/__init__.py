"""Observation of a run: logging, metrics, phases, traces, trackers, alarms.

Start with `trackers.py`. Metrics and spans enter; files, dashboards and alarms leave.
"""
