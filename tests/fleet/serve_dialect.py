"""serve_dialect.py vllm|sglang PORT: a fake server as a process, in the dialect recorded of the real one."""

import asyncio
import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


async def serve(dialect, port):
    name = {"vllm": "FakeVLLM", "sglang": "FakeSGLang"}[dialect]
    server = getattr(importlib.import_module(f"tests.fleet.fake_{dialect}"), name)(version=5)
    await server.start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
