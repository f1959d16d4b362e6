"""The file of a small run."""

MINIMAL = """
experiment_name: sort
trial_name: t0
allocation_mode: native:d1+fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8}
actor: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""
