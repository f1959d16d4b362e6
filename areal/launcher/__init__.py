"""The start of a run: configuration to launch plan to processes. It never imports torch.

Start with `job.py`. A configuration enters; running, supervised processes and the result of the run leave.
"""
