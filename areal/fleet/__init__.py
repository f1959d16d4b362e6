"""Clients of the inference servers: one fleet over many replicas, one adapter for each kind of server."""
