"""The rewards that a package itself gives to answers: PYTHON own_rewards.py KIND < [[row, answers], ...]. No areal."""

import asyncio
import importlib
import itertools
import json
import pathlib
import random
import sys


def reasoning_gym(row, answers):
    gym = importlib.import_module("reasoning_gym")
    dataset = gym.create_dataset(row["env"], size=row["index"] + 1, seed=row["seed"])
    return dataset.score_answer(answers[0], dataset[row["index"]])


def reference(row, answers):
    gym = importlib.import_module("reasoning_gym")
    return gym.create_dataset(row["env"], size=row["index"] + 1, seed=row["seed"])[row["index"]]["answer"]


def textarena(row, answers):
    """The rewards of all players, and the number of moves that were asked for."""
    game, left, done = importlib.import_module("textarena").make(row["env"]), list(answers), False
    game.reset(num_players=2 if row["env"].startswith(("Nim", "TicTacToe")) else 1, seed=row["seed"] + row["index"])
    players = []
    while not done:
        players.append(game.get_observation()[0])
        done, _ = game.step(left.pop(0))
    rewards, _ = game.close()
    return [rewards[player] for player in sorted(set(players))]


def openenv(row, answers):
    sys.path.insert(0, "examples/environments")
    module = importlib.import_module("guess_server")
    game, total = module.Guessing(), 0.0
    game.reset(seed=row["seed"] + row["index"])
    for answer in answers:
        hint = game.step(module.Guess(number=int(answer)))
        total += hint.reward
        if hint.done:
            return total
    raise AssertionError("the answers do not end the game")


def verifiers(row, answers):
    """The reward and the metrics of the last answer, as the package scores a trace of these turns."""
    task = verifiers_task(row)
    vf, trace, graph = (importlib.import_module(f"verifiers.v1{name}") for name in ("", ".trace", ".graph"))
    nodes = [graph.MessageNode(message=vf.UserMessage(content=task.data.prompt))]
    for answer in answers:
        message = vf.AssistantMessage(content=answer)
        nodes.append(graph.MessageNode(parent=len(nodes) - 1, message=message, sampled=True))
    agent = trace.AgentInfo(config=vf.AgentConfig())
    scored = trace.Trace(agent=agent, task=trace.TraceTask(type="Task", data=task.data), nodes=nodes)
    asyncio.run(task.score(scored))
    return [scored.reward, scored.metrics]


def verifiers_task(row):
    file = pathlib.Path(row["env"])
    sys.path.insert(0, str(file.parent))
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    config = loaders.taskset_config_type(file.stem).model_validate({"id": file.stem, **row["config"]})
    number = row["seed"] + row["index"]
    return next(itertools.islice(loaders.load_taskset(config), number, None))


def verifiers_answer(row, answers):
    return verifiers_task(row).data.answer


KINDS = {
    "verifiers": verifiers,
    "verifiers_answer": verifiers_answer,
    "reasoning_gym": reasoning_gym,
    "reference": reference,
    "textarena": textarena,
    "openenv": openenv,
}

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    sys.stdout.write(json.dumps([KINDS[sys.argv[1]](row, answers) for row, answers in asked]))
    random.seed()
