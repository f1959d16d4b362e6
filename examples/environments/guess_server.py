"""A game of OpenEnv: guess a number between 0 and 9 within four turns; the answer is higher, lower, or right.

`workflow_args.env: examples/environments/guess_server.py:app` serves it; `uvicorn guess_server:app` does so anywhere.
"""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_app

TURNS = 4
SESSIONS = 64


class Guess(Action):
    """One guess."""

    number: int


class Hint(Observation):
    """What the policy sees."""

    text: str = ""


class Guessing(Environment):
    """One game. Its seed decides the number."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self._number = random.Random(seed).randrange(10)
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(text="guess", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        self._state.step_count += 1
        if action.number == self._number:
            return Hint(text="right", done=True, reward=1.0)
        text = "higher" if action.number < self._number else "lower"
        return Hint(text=text, done=self._state.step_count >= TURNS, reward=0.0)

    @property
    def state(self) -> State:
        return self._state


app = create_app(Guessing, Guess, Hint, env_name="guessing", max_concurrent_envs=SESSIONS)
