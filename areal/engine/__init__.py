"""Owns the train engines and the clients of inference servers."""
