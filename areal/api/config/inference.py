"""Owns the options of generation: sampling, and the native inference server."""

from __future__ import annotations

from dataclasses import dataclass, field

from areal.api.config.fields import Problems, choice, number


@dataclass(frozen=True, kw_only=True)
class GenerationHyperparameters:
    """Sampling settings of a request."""

    n_samples: int = number(1, low=1)
    """Completions per prompt, the group size; workflows send that many requests."""
    max_new_tokens: int = number(16384, low=1)
    """Most tokens generated per answer."""
    min_new_tokens: int = number(0, low=0)
    """Fewest tokens generated before a stop token or string may end the answer."""
    max_tokens: int = number(65536, low=2)
    """Most tokens of prompt and answer together."""
    greedy: bool = False
    """Always take the likeliest token; temperature, top_p and top_k are then not used for the choice."""
    top_p: float = number(1.0, above=0, high=1)
    """Nucleus mass: sample among the likeliest tokens whose probabilities sum to this; 1 = all."""
    top_k: int = number(100_000_000, low=1)
    """Sample among this many likeliest tokens; the default means all."""
    temperature: float = number(1.0, above=0)
    """Softmax temperature."""
    stop_token_ids: list[int] = field(default_factory=list[int])
    """Token ids that end an answer, besides the tokenizer's end token."""
    stop: list[str] | None = None
    """Strings that end an answer; null = none."""
    frequency_penalty: float = number(0.0, low=-2, high=2)
    """Taken off a token's logit for each time it was generated before; negative favours repetition."""
    repetition_penalty: float = number(1.0, above=0)
    """Divides positive and multiplies negative logits of tokens seen in prompt or answer; 1 = off."""
    ignore_eos: bool = False
    """Go on past stop tokens until max_new_tokens."""

    def problems(self) -> Problems:
        if self.min_new_tokens > self.max_new_tokens:
            yield "min_new_tokens", f"{self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}: lower it"
        if any(token < 0 for token in self.stop_token_ids):
            yield "stop_token_ids", f"{self.stop_token_ids} holds a negative id: token ids start at 0"
        if self.stop is not None and "" in self.stop:
            yield "stop", "holds an empty string, which would end every answer at once: remove it"


@dataclass(frozen=True, kw_only=True)
class NativeServerConfig:
    """The native inference server: one process, one copy of the policy."""

    model_path: str = ""
    """Folder or hub name of the first weights; empty = actor.path."""
    dtype: str = choice("bfloat16", "bfloat16", "float32")
    """Weight and compute type."""
    device: str = choice("auto", "auto", "cpu", "cuda")
    """Where the model runs; auto = CUDA when there is one, else CPU."""
    context_length: int | None = number(None, low=2)
    """Longest prompt plus answer in tokens; null = the model's own limit."""
    max_running_requests: int = number(256, low=1)
    """Most requests decoded together; more wait in the queue."""
    max_total_tokens: int | None = number(None, low=64)
    """Room of the KV cache in tokens; null = max_running_requests x 512 on CPU, what fits the GPU on CUDA."""
    chunked_prefill_size: int = number(2048, low=16)
    """Most prompt tokens computed in one step, so that long prompts do not stall decoding."""
    random_seed: int = number(1, low=0)
    """Base of the sampling seed for requests without one; each replica adds its index."""
    log_level: str = choice("info", "debug", "info", "warning", "error")
    """Least severe level written to the server's log."""

    def problems(self) -> Problems:
        if self.max_total_tokens and self.context_length and self.max_total_tokens < self.context_length:
            yield (
                "max_total_tokens",
                f"{self.max_total_tokens} is below context_length={self.context_length}: "
                "one request of full length would never fit; raise it",
            )
