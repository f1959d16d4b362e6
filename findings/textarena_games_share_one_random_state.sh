#!/usr/bin/env bash
# TextArena: a game's seed is set for the whole process, and games that are played at the same time change each other.
#
# Version: textarena 0.7.4, Python 3.11, Linux; the games 2048 and GuessTheNumber.
#
# Assumption: reset(seed=...) seeds that game, as the `seed` of a Gymnasium environment does: the same seed and the same
# moves give the same game, whatever else the process does.
#
# Behaviour: reset seeds the generator of Python's module `random`, and the games draw from it while they are played. A
# second game that starts between two moves replaces the state, so the first game continues otherwise. The program that
# calls reset draws from that seed too: its own shuffles are the same after each game with this seed.
#
# Output seen:
#   2048 with seed 1 and the same eight moves: equal alone True, equal beside a game with seed 2 False
#   draws of the caller after two resets of GuessTheNumber with seed 5: 0.2554 0.2554
#
# Why it matters: a rollout worker that plays many episodes concurrently in one process gives boards that no seed
# reproduces, so a replay of the run differs, and the members of a group do not play the same game. A trainer in the
# same process repeats its own random numbers. A process for each game is needed.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check textarena==0.7.4
HOME="$folder" "$folder/env/bin/python" -W ignore - <<'PYTHON'
import random

import textarena


def started(name, seed):
    game = textarena.make(name)
    game.reset(num_players=1, seed=seed)
    return game


def boards(has_other):
    game, seen = started("2048-v0", 1), []
    if has_other:
        started("2048-v0", 2)
    for move in ["[left]", "[up]", "[right]", "[down]"] * 2:
        game.get_observation()
        game.step(move)
        seen.append([list(row) for row in game.state.game_state["board"]])
    return seen


alone, again, beside = boards(False), boards(False), boards(True)
equal = (alone == again, alone == beside)
print(f"2048 with seed 1 and the same eight moves: equal alone {equal[0]}, equal beside a game with seed 2 {equal[1]}")
draws = []
for seed_of_caller in (11, 12):
    random.seed(seed_of_caller)
    started("GuessTheNumber-v0", 5)
    draws.append(random.random())
print("draws of the caller after two resets of GuessTheNumber with seed 5:", *(f"{draw:.4f}" for draw in draws))
raise SystemExit(0 if equal == (True, False) and draws[0] == draws[1] else 1)
PYTHON
