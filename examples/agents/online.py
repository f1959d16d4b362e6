"""Trains on a program that areal does not start. In another terminal, with workflow_args={online: true} in the run:

python examples/agents/online.py runs/agents/calculator
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import calculator
import httpx
from openai import AsyncOpenAI


async def one_session(http: httpx.AsyncClient, address: str, token: str) -> None:
    """Open a session, answer its question, and report the reward. Waits while no episode has a place (429)."""
    while True:
        opened = await http.post(f"{address}/sessions", json={}, headers={"Authorization": f"Bearer {token}"})
        if opened.status_code != 429:
            break
        await asyncio.sleep(float(opened.headers["Retry-After"]))
    opened.raise_for_status()
    session = opened.json()
    client = AsyncOpenAI(base_url=session["base_url"], api_key=session["key"], http_client=http)
    reward = await calculator.run(session["row"], client, None)
    await http.post(f"{address}/sessions/{session['key']}/reward", json={"reward": reward})


async def main(run: Path) -> None:
    address, token = json.loads((run / "sessions.json").read_text())["base_url"], (run / "token").read_text().strip()

    async def worker(http: httpx.AsyncClient) -> None:
        while True:
            await one_session(http, address, token)

    async with httpx.AsyncClient(timeout=600) as http:
        await asyncio.gather(*(worker(http) for _ in range(64)))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
