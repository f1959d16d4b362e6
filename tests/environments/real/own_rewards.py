"""The rewards that a package itself gives to answers: PYTHON own_rewards.py KIND < [[row, answers], ...]. No areal."""

import asyncio
import functools
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


@functools.cache
def nemo_gym_app(server):
    module = importlib.import_module(f"resources_servers.{server}.app")
    base = importlib.import_module("nemo_gym.base_resources_server").SimpleResourcesServer
    client = importlib.import_module("nemo_gym.server_utils").ServerClient.model_construct()
    ours = [var for var in vars(module).values() if isinstance(var, type) and var.__module__ == module.__name__]
    (kind,) = [item for item in ours if issubclass(item, base)]
    config = kind.model_fields["config"].annotation(host="", port=1, entrypoint="app.py", name=server)
    return kind(config=config, server_client=client).setup_webserver()


def nemo_gym(row, answers):
    """The reward for texts, and for calls as [tool, arguments], through the application of the server."""
    task = {name: value for name, value in row.items() if name != "server"}
    client = importlib.import_module("starlette.testclient").TestClient(nemo_gym_app(row["server"]))
    steps = client.post("/seed_session", json=task).status_code == 404
    if steps:
        client.post("/reset", json=task)
    output, rewards = [], []
    for number, answer in enumerate(answers):
        if isinstance(answer, str):
            text = {"type": "output_text", "text": answer, "annotations": []}
            shared = {"role": "assistant", "status": "completed", "content": [text]}
            output.append({"type": "message", "id": f"msg_{number}", **shared})
        else:
            name, arguments = answer
            call = {"call_id": f"call_{number}", "name": name, "arguments": json.dumps(arguments)}
            output.append({"type": "function_call", **call})
            result = client.post(f"/{name}", json=arguments).text
            output.append({"type": "function_call_output", "call_id": f"call_{number}", "output": result})
        if steps:
            inputs = task | {"response": nemo_gym_response(output[-1:])}
            rewards.append(client.post("/step", json=inputs).json()["reward"])
    if not steps:
        rewards = [client.post("/verify", json=task | {"response": nemo_gym_response(output)}).json()["reward"]]
    return sum(rewards)


def nemo_gym_response(output):
    shared = {"object": "response", "created_at": 0, "model": "m", "parallel_tool_calls": True}
    return {"id": "resp", **shared, "tool_choice": "auto", "tools": [], "output": output}


def nemo_gym_examples(row, answers):
    """The rows that the package ships."""
    (folder,) = importlib.import_module("resources_servers").__path__
    lines = pathlib.Path(folder, row["server"], "data/example.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


KINDS = {
    "nemo_gym": nemo_gym,
    "nemo_gym_examples": nemo_gym_examples,
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
