"""The rollout controller: admission, episodes, batches, evaluation; and the client of the trainers. No torch."""
