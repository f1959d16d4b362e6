"""Trains on a program that areal does not start. In another terminal, with workflow_args={online: true} in the run:

python examples/agents/online.py RUN [--sessions 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
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


async def main(run: Path, num_sessions: int, patience_s: float) -> None:
    """Hold sessions until no server answers for `patience_s`. A controller that starts again has another address."""

    async def work(http: httpx.AsyncClient) -> None:
        down_since_s = None
        while down_since_s is None or time.monotonic() - down_since_s < patience_s:
            address = json.loads((run / "sessions.json").read_text())["base_url"]
            try:
                await one_session(http, address, (run / "token").read_text().strip())
                down_since_s = None
            except httpx.TransportError:
                down_since_s = down_since_s or time.monotonic()
                await asyncio.sleep(0.5)

    async with httpx.AsyncClient(timeout=600) as http:
        await asyncio.gather(*(work(http) for _ in range(num_sessions)))
    print(f"no session server for {patience_s:g} s: the run has ended")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--sessions", type=int, default=64, help="sessions at the same time")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without a session server (default: 60)")
    args = parser.parse_args()
    asyncio.run(main(args.run, args.sessions, args.patience))
