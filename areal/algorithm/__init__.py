"""Owns the mathematics of reinforcement learning as pure tensor functions; never torch.distributed."""
