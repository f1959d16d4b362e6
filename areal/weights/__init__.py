"""Weight channels: how policy weights travel from the trainer to the servers, over a folder or a collective.

Start with `disk.py`. Named tensors enter; a published version on every server leaves.
"""
