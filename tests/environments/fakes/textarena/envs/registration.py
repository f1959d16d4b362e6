"""Names of games."""

ENV_REGISTRY = {"Guess-v0": None, "Race-v0": None, "Late-v0": None, "Both-v0": None}
