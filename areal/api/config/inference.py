"""Options of generation: sampling, and the native inference server."""

from dataclasses import dataclass

from areal.api.config.fields import Problems, choice, number, option, section
from areal.api.config.relevance import when

_SAMPLED = when("greedy", False)


@dataclass(frozen=True, kw_only=True)
class GenerationHyperparameters:
    """Sampling settings of a generation request."""

    n_samples: int = number(1, low=1, also="verl: rollout.n; ROLL: num_return_sequences_in_group")
    """Answers per prompt (group size); the workflow sends one request for each."""
    max_new_tokens: int = number(16384, low=1, also="verl: data.max_response_length; ROLL: response_length")
    """Maximum generated tokens per answer."""
    min_new_tokens: int = number(0, low=0)
    """Minimum generated tokens before a stop token or stop string can end an answer."""
    max_tokens: int = number(65536, low=2)
    """Maximum tokens of prompt and answer together."""
    greedy: bool = option(False, also="verl: rollout.do_sample=false")
    """Always choose the most likely token."""
    top_p: float = number(1.0, above=0, high=1, relevant=_SAMPLED, also="verl: rollout.top_p")
    """Nucleus sampling: sample among the most likely tokens with this total probability; 1 = all tokens."""
    top_k: int = number(100_000_000, low=1, relevant=_SAMPLED, also="verl: rollout.top_k")
    """Sample among this number of most likely tokens; the default includes all tokens."""
    temperature: float = number(1.0, low=1e-6, high=1e6, also="verl: rollout.temperature")
    """Sampling temperature: logits are divided by it, also for the reported log-probabilities."""
    temperature_key: str = option("", relevant=_SAMPLED)
    """Dataset column with the temperature of each row, in place of `temperature` where it has a value; empty = none."""
    stop_token_ids: list[int] = section(list[int])
    """Token ids that end an answer, in addition to the tokenizer's end token."""
    stop: list[str] | None = None
    """Strings that end an answer; null = none."""
    frequency_penalty: float = number(0.0, low=-2, high=2)
    """Subtracted from a token's logit once per earlier occurrence in the answer; negative values favour repetition."""
    repetition_penalty: float = number(1.0, low=1e-3, high=1e3, also="ROLL: generating_args.repetition_penalty")
    """Divides positive and multiplies negative logits of tokens that occur in prompt or answer; 1 = off."""
    ignore_eos: bool = option(False, also="verl: rollout.ignore_eos")
    """Ignore stop tokens and generate until max_new_tokens."""

    def problems(self) -> Problems:
        if self.min_new_tokens > self.max_new_tokens:
            yield "min_new_tokens", f"{self.min_new_tokens} is above max_new_tokens={self.max_new_tokens}: lower it"
        if min(self.stop_token_ids, default=0) < 0:
            yield "stop_token_ids", f"contains {min(self.stop_token_ids)}: token ids start at 0"
        if self.stop is not None and "" in self.stop:
            yield "stop", "contains an empty string, which would end every answer at once: remove it"


@dataclass(frozen=True, kw_only=True)
class NativeServerConfig:
    """The native inference server: one process with one copy of the policy."""

    model_path: str = ""
    """Folder or hub name of the initial weights; empty = actor.path."""
    dtype: str = choice("bfloat16", "bfloat16", "float32")
    """Data type of weights and computation."""
    head_dtype: str = choice("auto", "auto", "float32", "compute", relevant=when("dtype", "bfloat16"))
    """Data type of logits: compute = that of `dtype`, auto = float32 on CUDA, else compute."""
    weight_buffer: str = choice("auto", "auto", "device", "host", relevant=when("device", "auto", "cuda"))
    """Second copy of the weights, for updates: device, host = updates wait for a copy, auto = device if it fits."""
    device: str = choice("auto", "auto", "cpu", "cuda")
    """Device of the model; auto = CUDA if available, else CPU."""
    context_length: int | None = number(None, low=2)
    """Maximum tokens of prompt and answer; null = the model's own limit."""
    max_running_requests: int = number(256, low=1)
    """Maximum requests decoded at the same time; others wait in a queue."""
    max_total_tokens: int | None = number(None, low=64)
    """Size of the KV cache in tokens; null = max_running_requests x 512 on CPU, what fits in GPU memory on CUDA."""
    chunked_prefill_size: int = number(2048, low=16)
    """Maximum prompt tokens per prefill step; longer prompts are split so that decoding continues between steps."""
    random_seed: int = number(1, low=0)
    """Base seed for requests without a seed; the index of the replica is added."""
    log_level: str = choice("info", "debug", "info", "warning", "error")
    """Minimum severity of the server's log messages."""

    def problems(self) -> Problems:
        if self.max_total_tokens and self.context_length and self.max_total_tokens < self.context_length:
            yield "max_total_tokens", f"{self.max_total_tokens} is below context_length={self.context_length}: raise it"
