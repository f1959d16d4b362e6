"""Options of the rollout controller: concurrency, staleness, requests."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from urllib.parse import urlsplit

from areal.api.config.schema import Problem, Problems, below, choice, given, number, option, section, when

# ----------------------------------------------------------------------------------------------------------------------
# Options of generation: sampling, and the native inference server.

_SAMPLED = when("greedy", False)
QUANTIZED_GROUP = 32
"""Inputs that share a scale in native.quantization=int4."""
QUANTIZED_BITS = {"int8": 8.0, "fp8": 8.0, "int4": 4.0, "mxfp4": 4.25, "nvfp4": 4.5}
"""Bits of a weight by kind of native.quantization, with its share of the 8-bit scales (mxfp4, nvfp4)."""


def quantization_refusal(kind: str, what: str) -> str:
    """Why a model with `what` is not quantized by native servers."""
    text = f"native.quantization={kind} covers the linear layers of dense models, and this one has {what}"
    return f"{text}: remove it, or use vllm servers with vllm.quantization"


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
    presence_penalty: float = number(0.0, low=-2, high=2)
    """Subtracted once from the logit of each token that occurs in the answer. Native servers only."""
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
    dtype: str = choice("auto", "auto", "bfloat16", "float32")
    """Data type of weights and computation; auto as in actor.dtype."""
    head_dtype: str = choice("auto", "auto", "float32", "compute", relevant=when("dtype", "auto", "bfloat16"))
    """Data type of logits: compute = that of `dtype`, auto = float32 on CUDA, else compute."""
    quantization: str = option("none", also="verl, cosmos-rl: rollout.quantization")
    """Weights of linear layers: int8, fp8 (a scale per output), int4, mxfp4 (per 32 inputs), nvfp4 (per 16), none."""
    weight_buffer: str = choice("auto", "auto", "device", "host", relevant=when("device", "auto", "cuda"))
    """Second copy of the weights, for updates: device, host = updates wait for a copy, auto = device if it fits."""
    device: str = choice("auto", "auto", "cpu", "cuda")
    """Device of the model; auto = CUDA if available, else CPU."""
    context_length: int | None = number(None, low=2)
    """Maximum tokens of prompt and answer; null = the model's own limit."""
    max_running_requests: int = number(256, low=1)
    """Maximum requests decoded at the same time; others wait in a queue."""
    max_total_tokens: int | None = number(None, low=64)
    """Size of the KV cache in tokens; null = by max_running_requests and the model on CPU, what fits on CUDA."""
    chunked_prefill_size: int = number(2048, low=16)
    """Maximum prompt tokens per prefill step; longer prompts are split so that decoding continues between steps."""
    speculation: str = choice("none", "none", "group")
    """group = a step verifies tokens that followed in prompt or other answers, where faster; answers stay equal."""
    max_adapters: int = number(32, low=1)
    """Maximum LoRA adapters that requests can name."""
    max_adapter_rank: int = number(128, low=1)
    """Maximum rank of such an adapter."""
    random_seed: int = number(1, low=0)
    """Base seed for requests without a seed; the index of the replica is added."""
    log_level: str = choice("info", "debug", "info", "warning", "error")
    """Minimum severity of the server's log messages."""

    @property
    def compute_dtype(self) -> str:
        """bfloat16 or float32, as `TrainEngineConfig.compute_dtype`."""
        return "bfloat16" if self.dtype == "auto" else self.dtype

    def cpu_cache_tokens(self, longest: int, *, weight_bytes: int, bytes_per_token: int) -> int:
        """The default size of the KV cache on the CPU: 512 tokens for each running request, in at most twice the size
        of the weights or 1 GiB. `longest`: the context length, for which there is always room."""
        wanted = self.max_running_requests * min(longest, 512)
        return max(longest, min(wanted, max(2 * weight_bytes, 2**30) // bytes_per_token))

    def num_snapshots(self, state_bytes: int, weight_bytes: int) -> int:
        """States that the prefix cache keeps: as many as running ones, in at most a quarter of the size of the weights
        or 256 MiB."""
        return min(self.max_running_requests, max(weight_bytes // 4, 2**28) // state_bytes) if state_bytes else 0

    def state_problems(self, state_bytes: int, free_bytes: int) -> Iterator[str]:
        """One sentence when memory of `free_bytes` lacks room for the states of all running sequences."""
        needed = self.max_running_requests * state_bytes
        if needed > free_bytes:
            yield (
                f"native.max_running_requests={self.max_running_requests}: the states of the model's layers take "
                f"{needed / 2**30:.1f} GiB, and a server has {free_bytes / 2**30:.1f} GiB for them: set it to at "
                f"most {max(free_bytes // state_bytes, 0)}"
            )

    def quantized_bytes(self, count: int, element_bytes: int) -> int:
        """Bytes of `count` weights of linear layers in the decoder's blocks."""
        bits = QUANTIZED_BITS.get(self.quantization, 8.0 * element_bytes)
        if self.quantization == "int4":
            bits += 2 * 8 * element_bytes / QUANTIZED_GROUP  # scale and zero
        return int(count * bits / 8)

    @staticmethod
    def packed_bytes(weight_bytes: int) -> int:
        """A server on the CPU has a copy of its weights in the order of oneDNN. Those that stay in the cache of a core
        gain nothing."""
        return weight_bytes if weight_bytes >= 1 << 24 else 0

    def problems(self) -> Problems:
        if self.quantization not in ("none", *QUANTIZED_BITS):
            text = f"{self.quantization!r} is not one of none, {', '.join(QUANTIZED_BITS)}"
            yield Problem("quantization", text, "config.not_a_choice")
        if self.max_total_tokens and self.context_length and self.max_total_tokens < self.context_length:
            yield "max_total_tokens", f"{self.max_total_tokens} is below context_length={self.context_length}: raise it"


# ----------------------------------------------------------------------------------------------------------------------
# Options of rewards: reward functions, their weights, and the process pool that runs them.

SOURCE_KEY = "data_source"
MATH_NEEDS_S = 11.0
"""Maximum seconds of the reward `math` for one answer: 10 to compare and 1 to start."""
CODE_TESTS_S, CODE_STARTS_S = 10.0, 5.0
"""Default seconds for all tests of one answer in the reward `code`, and maximum seconds to start them."""


_REMOTE = when("backend", "remote")


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The sandbox in which the reward `code` runs the programs of completions."""

    backend: str = choice("local", "local", "bubblewrap", "remote")
    """local = areal's own sandbox (x86-64); bubblewrap = the command bwrap; remote = a SandboxFusion service."""
    url: str = option("", relevant=_REMOTE, also="verl: reward.sandbox_fusion.url")
    """Address of the service, e.g. http://10.0.0.7:8080; the path /run_code is added."""
    max_requests: int = number(4, low=1, relevant=_REMOTE, also="verl: reward.sandbox_fusion.max_concurrent")
    """Maximum number of open requests of one reward worker (reward.workers)."""
    retries: int = number(3, low=0, relevant=_REMOTE)
    """Maximum number of repetitions of a request that the service did not answer or answered with an internal error."""

    def problems(self) -> Problems:
        parts = urlsplit(self.url)
        if self.backend == "remote" and not (parts.scheme in ("http", "https") and parts.hostname):
            yield Problem(
                "url", f"{self.url!r} is not an address such as http://10.0.0.7:8080", "config.missing_requirement"
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward of an answer: a weighted sum of functions, chosen by the source of the row, run in a process pool."""

    fns: dict[str, float] = section(dict[str, float], also="cosmos-rl: reward_function")
    """Reward functions and weights of their sum, e.g. {gsm8k: 1.0, format: 0.1}; {} = reward_fn."""
    by_source: dict[str, dict[str, float]] = field(default_factory=dict[str, dict[str, float]])
    """Reward functions and weights for the rows of each source; rows of other sources use fns."""
    source_key: str = option(SOURCE_KEY, relevant=given("by_source"))
    """Dataset column with the source of a row."""
    filter_on: list[str] = section(
        list[str], relevant=given("/rollout.should_accept_fn"), also="cosmos-rl: filter_reward_metric"
    )
    """Functions, named as in fns, whose weighted sum rollout.should_accept_fn uses; [] = the whole reward."""
    workers: int | None = number(None, low=1)
    """Number of worker processes; null = half of the CPU cores, at least one."""
    timeout_s: float = number(15.0, above=0)
    """Maximum seconds of one call; a worker that exceeds it is killed and replaced."""
    on_error: str = choice("fail", "fail", "zero")
    """After an exception, a time-out or a non-finite value: fail = the episode fails, zero = the value is 0."""

    sandbox: SandboxConfig = section(SandboxConfig)
    """The sandbox in which the reward `code` runs the programs of completions."""

    def problems(self) -> Problems:
        for path, fns in self.tables():
            yield from _weight_problems(path, fns)
        if not self.source_key:
            text = f"is empty: set the column with the source of a row, for example {SOURCE_KEY}"
            yield Problem("source_key", text, "config.missing_requirement")

    def tables(self) -> Iterator[tuple[str, dict[str, float]]]:
        """(key, functions and weights) of every non-empty set of functions."""
        if self.fns:
            yield "fns", self.fns
        for source, fns in self.by_source.items():
            yield f"by_source.{source}", fns

    @property
    def names_functions(self) -> bool:
        """Whether fns or by_source names a reward function."""
        return bool(self.fns or self.by_source)


def _weight_problems(path: str, fns: Mapping[str, float]) -> Problems:
    if not fns:
        text = "contains no function: add at least one, for example {exact: 1.0}"
        yield Problem(path, text, "config.missing_requirement")
    for name, weight in fns.items():
        if not math.isfinite(weight):
            yield Problem(f"{path}.{name}", f"the weight {weight} is not a finite number", "config.out_of_range")
    if fns and not any(fns.values()):
        yield path, "gives every function the weight 0, so every reward is 0: raise one"


def _tables(config: RewardConfig, short_form: str) -> dict[str, dict[str, float]]:
    """Absolute path -> functions and weights, `reward_fn` included."""
    tables = {f"reward.{path}": fns for path, fns in config.tables()}
    return tables | ({"reward_fn": {short_form: 1.0}} if short_form and not config.fns else {})


def selection_problems(config: RewardConfig, *, short_form: str) -> Problems:
    """Contradictions between reward.* and reward_fn (`short_form`; empty = not set). Paths are absolute."""
    if short_form and config.fns:
        yield "reward_fn", "and reward.fns both select reward functions: remove one"
    tables = _tables(config, short_form)
    known = {name for fns in tables.values() for name in fns}
    for name in config.filter_on:
        if name not in known:
            text = f"{name!r} is not one of the reward functions ({', '.join(known) or 'none'}): add it there"
            yield "reward.filter_on", text
    if config.filter_on and set(config.filter_on) <= known:
        for path, fns in tables.items():
            # Without one of them the filter sees the same number for every answer.
            if not any(fns.get(name) for name in config.filter_on):
                text = (
                    f"{path} gives no weight to {', '.join(config.filter_on)}, so the filter value is constant: add one"
                )
                yield "reward.filter_on", text
    slow = sorted(known & {"math", "geometry3k", "virl39k"})
    if config.on_error == "fail" and slow and config.timeout_s < MATH_NEEDS_S:
        text = f"{config.timeout_s:g} s is below the {MATH_NEEDS_S:g} s that the reward {slow[0]} can need"
        yield "reward.timeout_s", f"{text}: raise it, or set reward.on_error=zero"
    users: dict[str, str] = {}
    for name, short in short_names(known).items():
        if short in users:
            text = f"{name} and {users[short]} have the same name {short} in the metrics: rename one of the functions"
            yield "reward.fns", text
        users[short] = name


def score_weight_problems(weights: Mapping[str, float], config: RewardConfig, *, short_form: str) -> Problems:
    """Weights of gdpo that do not fit the reward functions. Paths are absolute."""
    path = "actor.adv_estimator.weights"
    for name, weight in weights.items():
        if not math.isfinite(weight):
            yield Problem(f"{path}.{name}", f"the weight {weight} is not a finite number", "config.out_of_range")
    if not weights or not (short_form or config.names_functions):
        return  # a script chooses the functions
    if not config.names_functions:
        yield path, "needs separate scores, and reward_fn is one function: name several in reward.fns, or remove it"
        return
    tables = _tables(config, short_form)
    shown = short_names({name for fns in tables.values() for name in fns})
    for name in sorted(set(weights) - set(shown.values())):
        yield f"{path}.{name}", f"is not one of the reward functions ({', '.join(sorted(shown.values()))}): correct it"
    for table, fns in tables.items():
        if not any(weights.get(shown[name]) for name in fns):
            yield path, f"gives no function of {table} a weight other than 0, so nothing is learned there: add one"


def short_names(names: set[str]) -> dict[str, str]:
    """Metric name of each function: the registered name, or the function name of a path.

    If several paths share it, the last part of their module or file is put before it, with a dot.
    """
    functions = {name: name.rpartition(":")[2] for name in sorted(names)}
    taken = list(functions.values())
    for name, function in functions.items():
        where = name.rpartition(":")[0]
        if where and taken.count(function) > 1:
            place = PurePath(where).stem if where.endswith(".py") else where.rpartition(".")[2]
            functions[name] = f"{place}.{function}"
    return functions


@dataclass(frozen=True, kw_only=True)
class TargetStaleness:
    """Set-point of staleness: admission is paced to hold one of them, below max_head_offpolicyness."""

    mean: float | None = number(None, above=0)
    """Mean staleness of the generated tokens of a batch, in policy versions; null = no such target."""
    ess: float | None = number(None, above=0, below=1)
    """Effective sample size of the importance weights of a batch, as a share of its tokens; null = no such target."""


@dataclass(frozen=True, kw_only=True)
class InferenceEngineConfig:
    """How the rollout controller runs episodes and talks to the inference servers."""

    max_concurrent_rollouts: int | None = number(None, low=1)
    """Maximum episodes in flight; null = train_dataset.batch_size x (max_head_offpolicyness + 1)."""
    queue_size: int | None = number(None, low=1)
    """Maximum episodes that run or wait for a train step, at least train_dataset.batch_size; null = no such limit."""
    consumer_batch_size: int | None = number(None, low=1)
    """Accepted for AReaL files: episodes per train step, must equal train_dataset.batch_size; null = that value."""
    max_head_offpolicyness: int = number(0, low=0, also="ROLL: async_generation_ratio")
    """Maximum staleness, in policy versions, that the admission gate allows; 0 = synchronous RL."""
    target_staleness: TargetStaleness = section(TargetStaleness)
    """The staleness to hold, in place of the highest that max_head_offpolicyness allows; not with dynamic_bs."""
    on_stale: str = choice("train", "train", "mask", "drop", "wait")
    """Use of answers above max_head_offpolicyness: train, mask their old tokens, drop; wait = in admission order."""
    weight_update: str = choice("interrupt", "interrupt", "keep", "keep_cache")
    """Requests at a weight update: interrupt = sent again, keep = KV cache recomputed, keep_cache = KV cache kept."""
    max_cache_age: int = number(4, low=0, relevant=when("weight_update", "keep_cache"))
    """Maximum age, in policy versions, of kept keys and values: an update that would exceed it computes all again."""
    canary: str = choice("on", "on", "off")
    """After each weight update compare the servers' answers to a fixed probe; restart a server that differs."""
    schedule_policy: str = choice("least_loaded", "round_robin", "least_loaded", "prefix_affinity")
    """Server of a request: in turn, fewest running requests, or longest cached prefix; groups stay on one server."""
    check_trajectory_format: bool = False
    """Also require for each trajectory: a trained token, log-probability 0 and version -1 only where not trained."""
    enable_rollout_tracing: bool = False
    """Log every start and end of an episode with the policy version and the numbers of episodes in each state."""
    should_accept_fn: str = ""
    """Filter of scored groups: a registered name (mixed_rewards) or module:function; empty = accept all groups."""
    max_rejected_per_step: int | None = number(None, low=1)
    """Maximum rejected groups per train step; the run fails above it; null = no limit."""
    dynamic_bs: bool = option(False, also="AReaL 1.0: dynamic_bs")
    """Start a step once batch_size groups are accepted or rejected; train on those accepted, one or more per rank."""
    batch_transfer: str = choice("auto", "auto", "files", "http")
    """Source of the batches of a rank: files = the ledger folder, http = the controller, auto = files if readable."""
    keep_rejected: int = number(32, low=0)
    """Newest rejected and failed episodes whose answers are kept in the ledger for `areal show`; 0 = none."""
    keep_payloads: str = option("all")
    """Trajectories kept: all; recover = since the second newest recovery checkpoint; N = also of the newest N steps."""
    server_addrs: list[str] = field(default_factory=list[str])
    """Running servers to use (host:port or http://host:port), one per server of allocation_mode; [] = start servers."""
    setup_timeout: float = number(300.0, above=0)
    """Maximum seconds until all servers, once they have loaded, are healthy; the default grows with the checkpoint."""
    stream_interval: int = number(32, low=1)
    """Tokens per event of a streamed answer; a request whose server fails loses at most this many tokens."""
    request_timeout: float = number(3600.0, above=0)
    """Maximum seconds of a generation request on one server; it then continues on another."""
    episode_timeout_s: float = number(3600.0, above=0)
    """Maximum seconds of an episode; it then fails and another one starts. Agents have agent.timeout_s instead."""
    request_retries: int = number(3, low=1)
    """Maximum server failures of one request before its episode fails."""
    pause_grace_period: float = number(0.0, low=0)
    """Seconds between pausing the servers and the weight update."""
    health_check_interval_s: float = number(1.0, above=0)
    """Seconds between two health checks of a server; a hung server is detected within eleven intervals."""
    weight_update_timeout_s: float = number(300.0, above=0)
    """Maximum seconds of a weight update on one server before the server is treated as failed."""

    def problems(self) -> Problems:
        if not re.fullmatch(r"all|recover|[1-9]\d*", self.keep_payloads):
            yield "keep_payloads", f"is {self.keep_payloads!r}: write all, recover, or a number of train steps from 1"
        if self.dynamic_bs and self.on_stale in ("drop", "wait"):
            yield (
                "dynamic_bs",
                f"makes batches of what is accepted first, which on_stale={self.on_stale} does not allow",
            )
        if self.dynamic_bs and self.max_rejected_per_step is not None:
            yield "dynamic_bs", "counts rejected groups as part of a step: remove max_rejected_per_step"
        yield from below("target_staleness", self._target_problems())
        for text, problem in address_problems(self.server_addrs):
            yield "server_addrs", f"{text!r} {problem}"

    def _target_problems(self) -> Problems:
        target, bound = self.target_staleness, self.max_head_offpolicyness
        name = "mean" if target.ess is None else "ess"
        if self.dynamic_bs and target != TargetStaleness():
            yield name, "cannot be held with rollout.dynamic_bs, which trains on all that waits: set that to false"
        if target.mean is not None and target.ess is not None:
            yield "ess", f"{target.ess:g} is a second target besides mean={target.mean:g}: remove one of them"
        if target.mean is not None and target.mean > bound:
            text = f"{target.mean:g} is above rollout.max_head_offpolicyness={bound}, the highest staleness: raise that"
            yield "mean", f"{text} to at least {math.ceil(target.mean)}, or lower mean"
        if target.ess is not None and bound == 0:
            yield "ess", "has nothing to pace with rollout.max_head_offpolicyness=0: raise that, or remove ess"


def address_problems(addresses: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(address, what is wrong with it) for every invalid or repeated server address."""
    seen: set[str] = set()
    for text in addresses:
        try:
            url = server_url(text)
        except ValueError as error:
            yield text, f"is not a server address ({error}): write host:port or http://host:port"
            continue
        if url in seen:
            yield text, "is listed twice: every server needs its own address"
        seen.add(url)


def server_url(text: str) -> str:
    """`text` as http://host:port. Raises ValueError with the reason if it is not a server address."""
    url = text if "://" in text else f"http://{text}"
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ValueError(f"only http is supported, not {parts.scheme}")
    if not parts.hostname or parts.username is not None or any(character.isspace() for character in text):
        raise ValueError("it has no host")
    if not parts.port:
        raise ValueError("it has no port")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError("there is text after the port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"http://{host}:{parts.port}"
