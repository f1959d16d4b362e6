"""Train engines: models, device meshes, packing, the output head, optimisers, checkpoints.

Start with `fsdp.py`. Batches enter; log-probabilities, updates and weights by Hugging Face name leave.
"""
