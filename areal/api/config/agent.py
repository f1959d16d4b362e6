"""Options of agents: the sessions in which programs talk to the policy, and how sessions become training samples."""

from dataclasses import dataclass
from typing import Any

from areal.api.config.fields import choice, number, option, section
from areal.api.config.relevance import when

_IN_PROCESSES = when("inline", False)


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Sessions of agents (workflow: agent)."""

    cut: str = choice("tree", "tree", "concat", "per_turn")
    """Samples of a session: tree = one per branch, shared tokens trained once; concat = one per branch; per_turn."""
    on_drift: str = choice("fork", "fork", "realign", "reject")
    """A prompt that does not extend its history: fork = a branch; realign = overwrite up to 64 tokens; reject = 400."""
    max_turns: int | None = number(None, low=1)
    """Maximum turns of a session; later ones are refused with 400; null = no limit."""
    max_tokens: int | None = number(None, low=1)
    """Maximum generated tokens of a session; gconfig.max_tokens limits one context; null = no limit."""
    max_seconds: float | None = number(None, above=0)
    """Maximum seconds from the first to the last turn of a session; the turn under way is cut; null = no limit."""
    timeout_s: float = number(600.0, above=0)
    """Maximum seconds of one run of an agent; it is then cancelled, and killed 5 s later."""
    sampling: str = choice("client", "client", "config")
    """Whose temperature, top_p, top_k and frequency_penalty count: those of the client's request, or gconfig only."""
    tool_parser: str = "auto"
    """Format of tool calls: auto = from the chat template, or the name of a model family (docs/agents.md)."""
    enable_thinking: bool = False
    """Render the chat template with enable_thinking."""
    template_options: dict[str, Any] = section(dict[str, Any])
    """Further variables of the chat template, e.g. {preserve_thinking: true}."""
    turn_discount: float = number(1.0, above=0, high=1)
    """Factor per later turn by which a reward counts for an earlier turn of the session; 1 = all turns alike."""
    missing_reward: str = choice("reject", "reject", "leave_out")
    """A session without a reward: reject = its episode is rejected; leave_out = train on the others."""
    reward_window_s: float = number(0.0, low=0)
    """Seconds that a finished session waits for a reward by POST; 0 = it must come before the agent ends."""
    inline: bool = False
    """Run Python agents on the event loop of the controller; a blocking agent then blocks the run."""
    workers: int | None = number(None, low=1, relevant=_IN_PROCESSES)
    """Worker processes for agents; null = half of the CPU cores, at least one."""
    sessions_per_worker: int = number(64, low=1, relevant=_IN_PROCESSES)
    """Maximum sessions that one worker process runs at the same time; others wait."""
    max_body_mb: int | None = number(None, low=1)
    """Maximum MiB of a request to a session; null = 16, plus 4 for each of vision.max_images with a vision model."""
    host: str = option("")
    """Address that the session server listens on; empty = loopback."""
    port: int = number(0, low=0, high=65535)
    """Port of the session server; 0 = any free one."""
