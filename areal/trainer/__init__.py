"""Composition: roles, training loops, saving, evaluation, recovery.

Start with `ppo_loop.py`. Shares of batches enter; new policy versions, checkpoints and metrics leave.
"""
