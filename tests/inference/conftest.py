"""Tiny random models, an engine driven step by step in the test's own thread, and a server with a client."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal.api.columns import ExpertShape
from areal.api.config import NativeServerConfig
from areal.api.data import PromptScoring
from areal.api.images import VisionLayout
from areal.inference import server
from areal.inference.drafts import Drafts
from areal.inference.engine import Engine
from areal.inference.model_runner import BLOCK_SIZE, ModelRunner, use_paged_attention
from areal.inference.prefix_cache import BlockPool
from areal.inference.scheduler import PlacedImage, SamplingParams, Scheduler, Sequence
from areal.inference.server import ServerOptions, serve
from areal.system.network import Host
from tests.inference.integrity import check_scheduler
from tests.run_token import BEARER, TOKEN

VOCABULARY = 50
PROMPT = [3, 4, 5, 6, 7]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that a wrong position or mask shows
    "bos_token_id": None,
    "eos_token_id": None,
}

_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "pad_token_id": None,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 3.0, "attn_implementation": "eager"}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**_SIZES, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3-gqa": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES, num_key_value_heads=1, head_dim=16)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, num_key_value_heads=4)),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**_SIZES, **_LATENT, **_EXPERTS)),
    "qwen2-windows": lambda: Qwen2ForCausalLM(
        Qwen2Config(**_SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_SIZES, **_CAPS, num_key_value_heads=2, head_dim=8, sliding_window=8, pad_token_id=None)
    ),
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(
            **_SIZES, num_key_value_heads=2, head_dim=8, sliding_window=8, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**_SIZES, num_key_value_heads=2, sliding_window=8)),
}

WITH_STATES = {
    "bamba": {"model_type": "bamba", "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 16},
    "falcon_h1": {"model_type": "falcon_h1", "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
    "jamba": {"model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2},
    "lfm2": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
    "nemotron_h": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "mlp", "full_attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
    },
    "olmo_hybrid": {"model_type": "olmo_hybrid"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_next": {"model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2},
}
"""Family -> what a small model with layers that keep a state has besides `_SIZES`."""
_LINEAR = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "head_dim": 8}
_LINEAR |= {"linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _with_states(family: str) -> PreTrainedModel:
    linear = _LINEAR if family in ("qwen3_5", "qwen3_next", "olmo_hybrid") else {}
    small = {"num_key_value_heads": 2, "pad_token_id": None, "initializer_range": 0.1}  # rounding grows with it
    config = AutoConfig.for_model(**_SIZES | small | linear | WITH_STATES[family])
    return AutoModelForCausalLM.from_config(config)


def _build(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return (_with_states(family) if family in WITH_STATES else FAMILIES[family]()).eval()


@dataclass
class Driver:
    """An engine without its thread: the test calls `run`."""

    engine: Engine
    finished: list[Sequence]
    progressed: list[Sequence]
    ids: Any = field(default_factory=itertools.count)

    def add(
        self,
        prompt: list[int],
        *,
        group_id: str = "",
        seed: int = 0,
        images: tuple[PlacedImage, ...] = (),
        adapter: int = 0,
        scoring: PromptScoring | None = None,
        **params: Any,
    ) -> Sequence:
        options = {"max_new_tokens": 8, "temperature": 0.0, **params}
        sequence = Sequence(
            request_id=str(next(self.ids)),
            token_ids=list(prompt),
            num_prompt=len(prompt),
            params=SamplingParams(**options),
            seed=seed,
            group_id=group_id,
            adapter=adapter,
            scoring=scoring,
            stream_interval=1,
            images=images,
        )
        self.engine.scheduler.add(sequence)
        return sequence

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
            check_scheduler(self.engine.scheduler)

    def run(self) -> None:
        """Until nothing is left; then the cache must be free to the last block."""
        scheduler = self.engine.scheduler
        while scheduler.running or scheduler.waiting:
            self.steps(1)
        assert scheduler.num_used_tokens == 0


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def build_model() -> Callable[..., PreTrainedModel]:
    """`build_model(family, seed=0)`: a plain transformers model."""
    return _build


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """`drive(model, num_blocks=..., max_running=..., max_prefill_tokens=...)`: an engine on a copy of the model."""

    def make(
        model: PreTrainedModel,
        *,
        num_blocks: int = 128,
        max_running: int = 32,
        max_prefill_tokens: int = 512,
        version: str = "0",
        detokenizer: Any = None,
        experts: ExpertShape | None = None,
        layout: VisionLayout | None = None,
        drafts: Drafts | None = None,
        num_snapshots: int = 8,
    ) -> Driver:
        ours = copy.deepcopy(model)
        use_paged_attention(ours)
        runner = ModelRunner(ours, experts=experts, layout=layout)
        snapshots = runner.states.allocate(max_running, num_snapshots)
        runner.allocate_cache(num_blocks)
        scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE),
            max_running=max_running,
            max_prefill_tokens=max_prefill_tokens,
            whole_images=layout is not None and layout.is_bidirectional,
            drafts=drafts,
            snapshots=snapshots,
        )
        finished: list[Sequence] = []
        progressed: list[Sequence] = []

        def deliver(ended: list[Sequence], news: list[Sequence]) -> None:
            finished.extend(ended)
            progressed.extend(news)

        engine = Engine(
            runner,
            scheduler,
            version=version,
            deliver=deliver,
            on_failure=lambda error: None,
            detokenizer=detokenizer,
        )
        return Driver(engine, finished, progressed)

    return make


@pytest.fixture
def prompts() -> list[list[int]]:
    """Prompts of awkward lengths: one token, a block, a block and one, several blocks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in (5, 20, 20, 37, 1, 60, 16, 17)]


@pytest.fixture
def reference_logprobs() -> Callable[[PreTrainedModel, list[int], float], torch.Tensor]:
    """Plain transformers: log_softmax(logits / T) [tokens, vocabulary] of one sequence."""

    def compute(model: PreTrainedModel, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([token_ids])).logits[0].float()
        return (logits / temperature).log_softmax(-1)

    return compute


@pytest.fixture
def checkpoint(tmp_path: Path, build_model: Callable[..., PreTrainedModel]) -> Callable[[int], Path]:
    """`checkpoint(seed)`: a folder with a Qwen3 model drawn with this seed."""

    def save(seed: int) -> Path:
        folder = tmp_path / f"weights-{seed}"
        if not folder.exists():
            build_model("qwen3-gqa", seed).save_pretrained(folder)
        return folder

    return save


@dataclass
class Served:
    """A running server and a client of it."""

    address: str
    session: aiohttp.ClientSession
    engine: Engine
    task: asyncio.Task[BaseException | None]

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        data = body if isinstance(body, bytes) else orjson.dumps(body or {})
        async with self.session.post(self.address + path, data=data) as response:
            answer = orjson.loads(await response.read())
            assert response.status == status, answer
            return answer

    async def get(self, path: str, status: int = 200) -> Any:
        async with self.session.get(self.address + path) as response:
            assert response.status == status
            return orjson.loads(await response.read())

    async def generate(self, status: int = 200, **body: Any) -> Any:
        sampling = {"max_new_tokens": 6, "temperature": 0, **body.pop("sampling_params", {})}
        full = {"input_ids": PROMPT, "return_logprob": True, "sampling_params": sampling, **body}
        return await self.post("/generate", full, status)

    async def events(self, **body: Any) -> AsyncIterator[Any]:
        sampling = {"max_new_tokens": 6, "temperature": 0, **body.pop("sampling_params", {})}
        full = {"input_ids": PROMPT, "return_logprob": True, "stream": True, "sampling_params": sampling, **body}
        async for event in self.events_of("/generate", full):
            yield event

    async def events_of(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        async with self.session.post(self.address + path, data=orjson.dumps(body)) as response:
            assert response.status == 200
            assert response.headers["Content-Type"] == "text/event-stream"
            rest = b""
            async for data in response.content.iter_any():
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    yield event.removeprefix(b"data: ")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(200):
            while not condition():
                await asyncio.sleep(0.002)


@pytest.fixture
def options(checkpoint) -> ServerOptions:
    return ServerOptions(
        native=NativeServerConfig(
            model_path=str(checkpoint(0)), dtype="float32", device="cpu", context_length=240, max_running_requests=8
        ),
        host=Host(),
        port=0,
        device="cpu",
        num_threads=1,
        token=TOKEN,
        process_name="server-0",
        index=0,
        registry=None,
    )


@pytest.fixture
def keep_engine(monkeypatch) -> list[Engine]:
    """Engines that servers of this test have built."""
    engines: list[Engine] = []
    build = server.build_engine

    def build_and_keep(*args: Any, **kwargs: Any) -> Engine:
        engines.append(build(*args, **kwargs))
        return engines[-1]

    monkeypatch.setattr(server, "build_engine", build_and_keep)
    return engines


@pytest.fixture
def serve_with(keep_engine: list[Engine]) -> Callable[..., AsyncIterator[Served]]:
    """`async for one in serve_with(options, headers)`: a server for the length of the loop's only round."""

    async def run(options: ServerOptions, headers: Any = BEARER) -> AsyncIterator[Served]:
        stopped, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        task = asyncio.create_task(serve(options, stopped, ready.set_result))
        done, _ = await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
        assert ready in done, task.result()
        async with aiohttp.ClientSession(
            headers={**headers, "Content-Type": "application/json"}, connector=aiohttp.TCPConnector(limit=0)
        ) as session:
            yield Served(ready.result(), session, keep_engine[-1], task)
        stopped.set()
        await task

    return run


@pytest.fixture
async def served(options: ServerOptions, serve_with: Callable[..., AsyncIterator[Served]]) -> AsyncIterator[Served]:
    async for item in serve_with(options):
        yield item
        assert not item.task.done()
