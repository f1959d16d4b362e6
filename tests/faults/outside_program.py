"""A program that areal does not start: it opens sessions, and continues with the next controller when one has died.

python outside_program.py RUN LOG. Each session that got its final report acknowledged is a line of LOG.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
from openai import AsyncOpenAI, OpenAIError

TURNS = 2
NUM_SESSIONS = 8


async def one_session(http: httpx.AsyncClient, address: str, token: str, log: Path) -> None:
    while True:
        opened = await http.post(f"{address}/sessions", json={}, headers={"Authorization": f"Bearer {token}"})
        if opened.status_code != 429:
            break
        await asyncio.sleep(float(opened.headers["Retry-After"]))
    session = opened.raise_for_status().json()
    client = AsyncOpenAI(base_url=session["base_url"], api_key=session["key"], http_client=http)
    messages, turns = [{"role": "user", "content": session["row"]["question"]}], []
    for _ in range(TURNS):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        turns.append(completion.id)
        messages += [completion.choices[0].message, {"role": "user", "content": "And then?"}]
    report = {"reward": float(len(turns[0]) % 3)}
    (await http.post(f"{address}/sessions/{session['key']}/reward", json=report)).raise_for_status()
    with log.open("a") as file:
        file.write(json.dumps({"session": session["session_id"], "turns": turns}) + "\n")


async def main(run: Path, log: Path) -> None:
    """Errors of a controller that has died end a session; the next one reads the address of its successor."""

    async def work(http: httpx.AsyncClient) -> None:
        while True:
            try:
                address = json.loads((run / "sessions.json").read_text())["base_url"]
                await one_session(http, address, (run / "token").read_text().strip(), log)
            except (OSError, httpx.HTTPError, OpenAIError):
                await asyncio.sleep(0.2)

    async with httpx.AsyncClient(timeout=60) as http, asyncio.TaskGroup() as group:
        for _ in range(NUM_SESSIONS):
            group.create_task(work(http))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
