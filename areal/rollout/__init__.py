"""Owns episodes: gate, ledger, executor, controller, and the trainer's client. No torch."""
