"""The ledger of a run: events, payloads, state and recovery; and the commands audit, show and stats. No torch."""
