"""Owns the contracts between packages: records, protocols, configuration. Imports nothing of ours and no torch."""
