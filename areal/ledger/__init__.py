"""The ledger of a run: events, payloads and state of all episodes; audit, statistics and recovery from its files."""
