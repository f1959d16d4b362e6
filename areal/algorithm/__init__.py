"""The mathematics of reinforcement learning as pure tensor functions, without torch.distributed."""
