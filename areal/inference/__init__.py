"""The native inference server: HTTP interface, engine, scheduler, paged KV cache, model runner.

Start with `engine.py`. HTTP requests enter through `server.py`; streams of tokens with log-probabilities leave.
"""
