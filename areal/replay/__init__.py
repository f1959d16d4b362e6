"""Replay: training again from the recorded batches of a run, without servers and without a controller.

Start with `rank.py`. The ledger of a run enters; new weights and a comparison with the recorded steps leave.
"""
