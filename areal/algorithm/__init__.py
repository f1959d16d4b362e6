"""The mathematics of reinforcement learning as pure tensor functions, without torch.distributed.

Start with `policy_loss.py`. Tensors of a micro-batch or of a batch enter; losses per token and advantages leave.
"""
