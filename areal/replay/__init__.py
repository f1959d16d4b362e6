"""Replay: training again from the recorded batches of a run, without servers and without a controller."""
