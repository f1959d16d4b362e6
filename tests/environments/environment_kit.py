"""Workflows of environments with a scripted policy, over fake packages or real ones."""

import re
from pathlib import Path

from areal.api.config import AgentConfig, GenerationHyperparameters
from tests.agent.policies import ScriptedEngine, tool_tokenizer

FAKES = Path(__file__).parent / "fakes"  # Workers import from the working directory: tests change to it.


def build(kind, *, n_samples=1, agent=None, **arguments):
    gconfig = GenerationHyperparameters(n_samples=n_samples, max_new_tokens=400, max_tokens=8000)
    return kind(gconfig, tool_tokenizer(), agent_config=AgentConfig(**(agent or {})), **arguments)


def policy(answer):
    """An engine that answers with what `answer` makes of the last message of the user."""

    def reply(prompt: str) -> str:
        return answer(re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)[-1])

    return ScriptedEngine(reply)


def trained_text(trajectory) -> str:
    pairs = zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
    return tool_tokenizer().decode([token for token, mask in pairs if mask])
