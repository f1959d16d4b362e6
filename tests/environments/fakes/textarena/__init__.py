"""A tiny textarena: two games, one for one player and one for two."""

import random

from . import envs
from .envs.registration import ENV_REGISTRY

__all__ = ["ENV_REGISTRY", "envs", "make"]


class Game:
    players = 1

    def __init__(self, limit=9):
        self.limit = limit

    def reset(self, num_players, seed=None):
        assert num_players == self.players
        random.seed(seed)
        self.target, self.text, self.player = random.randrange(self.limit), "[GAME] guess", 0
        self.rewards, self.infos = (
            None,
            {place: {"turn_count": 0, "invalid_move": False} for place in range(num_players)},
        )

    def get_observation(self):
        return self.player, self.text

    def step(self, text):
        self.text += f"\n[Player] {text}"
        self.infos[self.player]["turn_count"] += 1
        if not text.isdigit():
            return self._end(0.4, invalid=True)
        if int(text) == self.target:
            return self._end(1.0)
        self.text += "\n[GAME] wrong"
        self.player = (self.player + 1) % self.players
        return False, {}

    def _end(self, reward, *, invalid=False):
        self.infos[self.player]["invalid_move"] = invalid
        self.rewards = {place: reward if place == self.player else -1.0 for place in self.infos}
        return True, {}

    def close(self):
        return self.rewards, self.infos


class Race(Game):
    players = 2


class Late(Race):
    """Player 1 begins."""

    def reset(self, num_players, seed=None):
        super().reset(num_players, seed)
        self.player = 1


class Both(Race):
    """Each player has one turn, and the longer answer wins."""

    def step(self, text):
        self.text += f"\n[Player] {text}"
        self.infos[self.player]["turn_count"] += 1
        if self.player:
            return self._end(1.0 if len(text) > 4 else 0.0)
        self.player = 1
        return False, {}


def make(name, **options):
    return {"Guess-v0": Game, "Race-v0": Race, "Late-v0": Late, "Both-v0": Both}[name](**options)
