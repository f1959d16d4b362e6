"""The ledger of a run: events, payloads, state and recovery; and the commands audit, show and stats. No torch.

Start with `ledger.py`. Events and token tables enter; the recovered state and the answers of its readers leave.
"""
