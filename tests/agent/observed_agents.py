"""Agents for a real run: they look where their key is, and do what agents of users do."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAI

MARK = "areal-left-behind"
"""In the command line of the process that an agent leaves behind."""


def holders(key: str) -> list[str]:
    """The other processes whose environment or command line contains `key`."""
    result: list[str] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        for name in ("environ", "cmdline"):
            try:
                if key.encode() in (folder / name).read_bytes():
                    result.append(f"{folder.name}/{name}")
            except OSError:
                continue
    return result


def question(row: dict[str, Any], text: str = "") -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": row["question"] + text}], "max_tokens": 4}


async def run(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    """Its key is in no environment and in no command line: its process serves many sessions."""
    assert not holders(session.key)
    assert session.key not in str(os.environ)
    await client.chat.completions.create(**question(row))
    return 1.0


async def raises(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    await client.chat.completions.create(**question(row))
    raise LookupError("no such page")


async def hangs(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    await client.chat.completions.create(**question(row))
    await asyncio.Event().wait()
    return 1.0


async def forks_a_child(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    subprocess.Popen([sys.executable, "-S", "-c", f"input() # {MARK}"], stdin=subprocess.PIPE)
    await client.chat.completions.create(**question(row))
    return 1.0


async def prints(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    print("text of an agent")  # noqa: T201
    print("more of it", file=sys.stderr)  # noqa: T201
    await client.chat.completions.create(**question(row))
    return 1.0


async def gathers(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    texts = [question(row, str(number)) for number in range(3)]
    await asyncio.gather(*(client.chat.completions.create(**text) for text in texts))
    return 1.0


async def blocks(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    with OpenAI(base_url=session.base_url, api_key=session.key) as ours:
        ours.chat.completions.create(**question(row))
    return 1.0


BEHAVIOURS = (raises, hangs, forks_a_child, prints, gathers, blocks, prints, gathers)


async def behaves(row: dict[str, Any], client: AsyncOpenAI, session: Any) -> float:
    """Each in turn, by the row."""
    return await BEHAVIOURS[int(row["answer"]) % len(BEHAVIOURS)](row, client, session)


def main() -> None:
    """As a command: its key is in its own environment only."""
    assert not holders(os.environ["OPENAI_API_KEY"])
    assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"]
    OpenAI().chat.completions.create(**question({"question": sys.argv[1]}))


if __name__ == "__main__":
    main()
