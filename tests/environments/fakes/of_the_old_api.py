"""An environment of the API 0.1 of verifiers."""

from verifiers import SingleTurnEnv


def load_environment():
    return SingleTurnEnv()
