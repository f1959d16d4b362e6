"""Reward functions: built-in verifiers, the pool of processes that runs them, the sandbox for programs.

Start with `pool.py`. Prompts, answers and columns of the row enter; finite numbers leave.
"""
