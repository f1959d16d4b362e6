"""Clients of the inference servers: one fleet over many replicas, one adapter for each kind of server.

Start with `fleet.py`. Generation requests and weight updates enter; answers with a version for each token leave.
"""
