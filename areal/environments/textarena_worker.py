"""TextArena in a worker: one process for each game, because a game seeds Python's global random numbers."""

import importlib
import random
import runpy

INSTALL = "pip install textarena==0.7.4"
FORKS = True
_MAX_PLAYERS = 2


class NoSuchGame(Exception):
    code = "env.not_found"


class Adapter:
    """`args`: `players` 1 or 2; `invalid_reward` replaces the reward of a player whose invalid move ended the game;
    `opponent`, FILE:FUNCTION, a function (observation, random.Random) -> move that plays for the other players, or
    {steps: N}, the policy of at most N versions before; `trained` (0), the place of the policy; `options` of the game.
    The config of a row replaces them."""

    def __init__(self, env, args):
        self._arena = importlib.import_module("textarena")
        self.env, self.args = env, args

    def episode(self):
        return Episode(self)

    def make(self, name, options):
        if name not in self._arena.envs.registration.ENV_REGISTRY:
            listed = "python -c 'import textarena.envs.registration as r; print(*r.ENV_REGISTRY)'"
            raise NoSuchGame(f"TextArena has no game {name!r}; they are listed by {listed}")
        return self._arena.make(name, **options)


def _function(path):
    """The function of FILE:NAME."""
    file, _, name = path.rpartition(":")
    return runpy.run_path(file)[name]


class Episode:
    """One game."""

    def __init__(self, adapter):
        self._adapter = adapter

    def reset(self, row):
        args = {**self._adapter.args, **(row.get("config") or {})}
        self._invalid_reward = args.get("invalid_reward")
        self._seed = row["seed"] + row["index"]
        self._game = self._adapter.make(row.get("env") or self._adapter.env, args.get("options") or {})
        self._begin([args["players"]] if "players" in args else [*range(1, _MAX_PLAYERS + 1)])
        opponent = args.get("opponent")
        self._opponent = _function(opponent) if opponent and isinstance(opponent, str) else None
        self._trained = args.get("trained", 0)
        self._random = random.Random(self._seed)
        self._seen = {}
        return self._next(False)

    def _begin(self, numbers):
        """Start with the first number of players that the game takes."""
        for number in numbers:
            try:
                self._game.reset(num_players=number, seed=self._seed)
                return
            except AssertionError:
                if number == numbers[-1]:
                    raise

    def step(self, message, is_cut):
        done, _ = self._game.step(message["content"] or "")
        return self._next(done)

    def _next(self, done):
        """What the next player sees that it has not seen, after the moves of the opponent."""
        while not done:
            player, text = self._game.get_observation()
            if self._opponent is None or player == self._trained:
                break
            done, _ = self._game.step(self._opponent(text, self._random))
        if done:
            return {"messages": [], "done": True, **self._result()}
        before = self._seen.get(player, "")
        self._seen[player] = text
        new = text[len(before) :] if text.startswith(before) else text
        seat = player if self._opponent is None else 0
        return {"player": seat, "messages": [{"role": "user", "content": new.strip()}], "done": False}

    def _result(self):
        rewards, infos = self._game.close()
        invalid = {player: bool(info.get("invalid_move")) for player, info in infos.items()}
        if self._invalid_reward is not None:
            rewards = {player: self._invalid_reward if invalid[player] else rewards[player] for player in rewards}
        places = sorted(rewards) if self._opponent is None else [self._trained]
        turns = sum(info.get("turn_count", 0) for info in infos.values())
        parts = {"invalid_end": float(any(invalid[place] for place in places)), "moves": float(turns)}
        return {"rewards": [float(rewards[place]) for place in places], "parts": parts}
