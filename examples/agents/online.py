"""Trains on a program that areal does not start. In another terminal, with workflow_args={online: true} in the run:

python examples/agents/online.py RUN [--sessions 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

import calculator
import httpx
from openai import AsyncOpenAI, OpenAIError


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
    try:
        reward = await calculator.run(session["row"], client, None)
    except OpenAIError as error:
        print(f"session {session['session_id']}: {error}", file=sys.stderr)
        reward = None  # a failure of the service is no fault of the policy: the session ends without a reward
    await http.post(f"{address}/sessions/{session['key']}/reward", json={"reward": reward})


async def main(run: Path, num_sessions: int) -> None:
    address, token = json.loads((run / "sessions.json").read_text())["base_url"], (run / "token").read_text().strip()

    async def work(http: httpx.AsyncClient) -> None:
        while True:
            await one_session(http, address, token)

    async with httpx.AsyncClient(timeout=600) as http:
        try:
            await asyncio.gather(*(work(http) for _ in range(num_sessions)))
        except httpx.TransportError:
            print(f"no session server at {address}: the run has ended")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--sessions", type=int, default=64, help="sessions at the same time")
    args = parser.parse_args()
    asyncio.run(main(args.run, args.sessions))
