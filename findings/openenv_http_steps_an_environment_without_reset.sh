#!/usr/bin/env bash
# OpenEnv: POST /reset and then POST /step use two environments; the second one was never reset.
#
# Version: openenv-core 0.3.0, Python 3.11, Linux.
#
# Assumption: the routes /reset and /step of a server are an episode of its environment, as reset and step of a WebSocket
# session are, at least for one client that sends one request after another.
#
# Behaviour: each HTTP request gets a new instance of the environment and discards it. /step answers with 200 from an
# instance whose reset was not called: a counter that begins at 100 gives 3 and then 4 for steps of 3 and 4, not 103 and
# 107. The WebSocket session of the same server gives 103 and 107.
#
# Output seen:
#   HTTP: [[100, null], [3, 0.0], [4, 0.0]]
#   WebSocket: [[100, null], [103, 0.0], [107, 1.0]]
#
# Why it matters: a trainer that plays episodes over HTTP gets plausible observations and rewards, of games that were not
# begun and do not continue. Nothing fails; the reward just never comes. Only WebSocket sessions are episodes.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check openenv-core==0.3.0
seen=$("$folder/env/bin/python" - 2>"$folder/log" <<'PYTHON'
import asyncio
import json
import threading
import time
import urllib.request

import uvicorn
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Add(Action):
    number: int


class Total(Observation):
    total: int = 0


class Counter(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state, self._total = State(), 0

    def reset(self, seed=None, episode_id=None, **options):
        self._total = 100
        return Total(total=self._total)

    def step(self, action, timeout_s=None, **options):
        self._total += action.number
        return Total(total=self._total, reward=float(self._total == 107))

    @property
    def state(self):
        return self._state


app = create_app(Counter, Add, Total, env_name="counter", max_concurrent_envs=4)
server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
threading.Thread(target=server.run, daemon=True).start()
while not server.started:
    time.sleep(0.05)
address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


def post(path, body):
    asked = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    answer = json.load(urllib.request.urlopen(asked))
    return [answer["observation"]["total"], answer["reward"]]


async def session():
    client = GenericEnvClient(base_url=address)
    found = [await client.reset(), await client.step({"number": 3}), await client.step({"number": 4})]
    await client.disconnect()
    return [[one.observation["total"], one.reward] for one in found]


begun = post("/reset", {})
steps = [post("/step", {"action": {"number": number}}) for number in (3, 4)]
print("HTTP:", json.dumps([begun, *steps]))
print("WebSocket:", json.dumps(asyncio.run(session())))
PYTHON
) || { cat "$folder/log"; exit 1; }
expected="HTTP: [[100, null], [3, 0.0], [4, 0.0]]
WebSocket: [[100, null], [103, 0.0], [107, 1.0]]"
echo "$seen"
[ "$seen" = "$expected" ] || exit 1
