"""The rollout controller: admission, episodes, batches, evaluation; and the client of the trainers. No torch.

Start with `controller.py`. Rows and accepted episodes enter; shares of batches leave.
"""
