"""Reward functions: built-in verifiers, their registry, and the pool of processes that runs them."""
