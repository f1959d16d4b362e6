"""LoRA adapters by request: their answers are those of peft, and do not depend on the requests of others."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from areal.api.data import PromptScoring
from areal.api.errors import RequestError
from areal.inference import scheduler
from areal.inference.generate_route import BodyParser
from areal.inference.request_parser import GenerateBody, RequestLimits
from areal.inference.scheduler import SamplingParams
from areal.inference.server import ServerOptions
from tests.inference.conftest import Driver, Served
from tests.inference.test_paged_kernel import with_graphs

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
PROMPT = [3, 4, 5, 6, 7]


@pytest.fixture
def write_adapter(tmp_path: Path) -> Callable[..., tuple[Path, PreTrainedModel]]:
    """`write_adapter(model, seed, rank=..., targets=...)`: a folder of peft, and the model with the adapter merged."""
    numbers = itertools.count()

    def write(
        model: PreTrainedModel, seed: int, rank: int = 4, targets: Any = ALL, **options: Any
    ) -> tuple[Path, PreTrainedModel]:
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options)
        adapted = get_peft_model(copy.deepcopy(model), config)
        folder = tmp_path / f"adapter{next(numbers)}"
        adapted.save_pretrained(str(folder))
        base = copy.deepcopy(model)
        if model.config.tie_word_embeddings:  # peft would merge the adapter of the head into the embedding
            base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
            base.config.tie_word_embeddings = False
        return folder, PeftModel.from_pretrained(base, str(folder)).merge_and_unload()

    return write


def load(driver: Driver, folder: Path, max_rank: int = 64) -> int:
    products = driver.engine.runner.adapters
    adapter = products.read(folder, None, max_rank)
    products.changed(added=adapter)()
    return adapter.number


FAMILIES = ["qwen2-tied", "qwen3-gqa", "llama", "deepseek_v3", "gemma2", "gpt_oss", "mistral-window"]
STATES = {"lfm2": "all-linear", "qwen3_5": "all-linear", "falcon_h1": ["q_proj", "down_proj", "in_proj", "lm_head"]}


@pytest.mark.parametrize("family", [*FAMILIES, *STATES])
def test_answers_are_those_of_the_merged_model(
    family: str,
    build_model: Callable[..., PreTrainedModel],
    drive: Callable[..., Driver],
    write_adapter: Callable[..., tuple[Path, PreTrainedModel]],
    prompts: list[list[int]],
    reference_logprobs: Callable[..., torch.Tensor],
) -> None:
    model = build_model(family)
    targets = STATES.get(family, ["q_proj", "o_proj", "lm_head"] if family in ("deepseek_v3", "gpt_oss") else ALL)
    if family == "deepseek_v3":
        targets = ["q_a_proj", "kv_b_proj", "o_proj", "lm_head"]
    served = [(0, model)]
    driver = drive(model, max_prefill_tokens=32)
    for seed, rank in ((1, 4), (2, 17)):
        folder, merged = write_adapter(model, seed, rank, targets)
        served.append((load(driver, folder), merged))
    cases = [(driver.add(prompt, adapter=number), merged) for prompt in prompts[:5] for number, merged in served]
    driver.run()
    for sequence, merged in cases:
        expected = reference_logprobs(merged, sequence.token_ids)[sequence.num_prompt - 1 : -1]
        chosen = expected.gather(1, torch.tensor(sequence.answer_ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(sequence.logprobs), chosen, atol=2e-4)
    assert len({sequence.logprobs[0] for sequence, _ in cases[:3]}) == 3


def test_the_answer_of_a_request_does_not_depend_on_the_requests_of_others(
    build_model: Callable[..., PreTrainedModel],
    drive: Callable[..., Driver],
    write_adapter: Callable[..., tuple[Path, PreTrainedModel]],
    prompts: list[list[int]],
) -> None:
    """Bit for bit, in any mix of adapters, prompts and steps."""
    model = build_model("qwen3-gqa")
    folders = [write_adapter(model, seed, rank)[0] for seed, rank in enumerate((1, 4, 16, 17, 40), 1)]
    alone: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
    for which, number in itertools.product(range(6), range(len(prompts))):
        driver = drive(model)
        adapter = load(driver, folders[which - 1]) if which else 0
        sequence = driver.add(prompts[number], adapter=adapter, temperature=1.0, seed=number)
        driver.run()
        alone[which, number] = sequence.answer_ids, sequence.logprobs
    chance = random.Random(1)
    for size in (2, 3, 5, 8, 13, 20, 31, 48):
        driver = drive(model, max_prefill_tokens=chance.choice((16, 40, 512)), num_blocks=chance.choice((40, 128)))
        order = chance.sample(range(1, 6), 5)
        adapters = {which: load(driver, folders[which - 1]) for which in order} | {0: 0}
        running: list[tuple[tuple[int, int], Any]] = []
        for _ in range(size):
            case = chance.randrange(6), chance.randrange(len(prompts))
            options = {"adapter": adapters[case[0]], "temperature": 1.0, "seed": case[1], "group_id": "one"}
            running.append((case, driver.add(prompts[case[1]], **options)))
            driver.steps(chance.randrange(3))
        driver.run()
        for case, sequence in running:
            assert (sequence.answer_ids, sequence.logprobs) == alone[case]


def test_another_tenants_infinite_values_stay_in_their_rows(
    build_model: Callable[..., PreTrainedModel],
    drive: Callable[..., Driver],
    write_adapter: Callable[..., tuple[Path, PreTrainedModel]],
) -> None:
    model = build_model("llama")
    driver = drive(model)
    good, bad = (load(driver, write_adapter(model, seed)[0]) for seed in (1, 2))
    alone = driver.add(PROMPT, adapter=good)
    driver.run()
    [group] = driver.engine.runner.adapters.groups
    for down, _ in group.weights.values():
        down[:, group.columns == bad] = 3e38
    both = [driver.add([*PROMPT[1:], 9], adapter=number) for number in (good, bad)]
    again = driver.add(PROMPT[:], adapter=good)
    driver.engine.scheduler.forget_prefixes()
    driver.run()
    assert both[1].finish.kind == "error"
    assert (again.answer_ids, again.logprobs) == (alone.answer_ids, alone.logprobs)


def broken(folder: Path, *, weights: dict[str, Any] | None = None, **config: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if weights is not None:
        save_file(load_file(folder / "adapter_model.safetensors") | weights, folder / "adapter_model.safetensors")


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"peft_type": "LOHA"}, "adapter.other_settings"),
        ({"use_dora": True}, "adapter.other_settings"),
        ({"r": 5}, "adapter.not_readable"),
        ({"r": 65}, "adapter.rank"),
        ({"weights": {f"{Q}A.weight": torch.full((4, 32), torch.inf)}}, "adapter.not_finite"),
        ({"weights": {f"{Q}A.weight": torch.zeros(4, 31)}}, "adapter.other_base"),
        ({"weights": {"base_model.model.model.norm.lora_A.weight": torch.zeros(4, 32)}}, "adapter.other_base"),
        ({"weights": {"base_model.model.lm_head.weight": torch.zeros(50, 32)}}, "adapter.not_servable"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(
    build_model: Callable[..., PreTrainedModel],
    drive: Callable[..., Driver],
    write_adapter: Callable[..., tuple[Path, PreTrainedModel]],
    change: dict[str, Any],
    code: str,
) -> None:
    model = build_model("llama")
    folder, _ = write_adapter(model, 1)
    broken(folder, **change)
    with pytest.raises(RequestError) as refused:
        load(drive(model), folder)
    assert refused.value.code == code


async def test_adapters_over_http(
    options: ServerOptions, serve_with: Callable[..., Any], write_adapter: Any, build_model: Any, tmp_path: Path
) -> None:
    folders = [str(write_adapter(build_model("qwen3-gqa"), seed)[0]) for seed in (1, 2, 3)]
    limited = replace(options, native=replace(options.native, max_adapters=2))
    async for served in serve_with(limited):
        await check_over_http(served, folders, tmp_path)


async def check_over_http(served: Served, folders: list[str], empty: Path) -> None:
    async def refusal(path: str, **body: Any) -> str:
        return (await served.post(path, body, 400))["code"]

    base = await served.generate()
    await served.post("/load_lora_adapter", {"lora_name": "a-1", "lora_path": folders[0]})
    assert await refusal("/load_lora_adapter", lora_name="a-1", lora_path=folders[1]) == "adapter.loaded"
    assert await refusal("/load_lora_adapter", lora_name="x", lora_path=str(empty)) == "adapter.not_readable"
    await served.post("/load_lora_adapter", {"lora_name": "b-1", "lora_path": folders[1]})
    assert (await served.get("/get_model_info"))["adapters"] == ["a-1", "b-1"]
    assert await refusal("/load_lora_adapter", lora_name="c-1", lora_path=folders[2]) == "adapter.limit"
    answers = await asyncio.gather(*(served.generate(lora_path=name) for name in ("", "a-1", "b-1")))
    assert [answer["meta_info"].get("lora_path") for answer in answers] == [None, "a-1", "b-1"]
    assert answers[0]["output_ids"] == base["output_ids"]
    assert len({answer["meta_info"]["output_token_logprobs"][0][0] for answer in answers}) == 3
    # A running request keeps its adapter, and the memory, until it ends.
    events = served.events(lora_path="a-1", sampling_params={"max_new_tokens": 230, "ignore_eos": True})
    await anext(events)
    unloading = asyncio.create_task(served.post("/unload_lora_adapter", {"lora_name": "a-1"}))
    while (await served.get("/get_model_info"))["adapters"] != ["b-1"]:
        pass
    assert (await served.generate(400, lora_path="a-1"))["code"] == "adapter.unknown"
    *_, last, _ = [event async for event in events]
    assert orjson.loads(last)["meta_info"]["lora_path"] == "a-1"
    await unloading
    assert [group.rank for group in served.engine.runner.adapters.groups] == [16]
    # New weights under the same name: nothing of the old ones is used.
    await served.post("/load_lora_adapter", {"lora_name": "a-1", "lora_path": folders[2]})
    again = await served.generate(lora_path="a-1")
    assert again["meta_info"]["output_token_logprobs"] != answers[1]["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_prompts_are_scored_as_transformers_does(
    build_model: Callable[..., PreTrainedModel],
    drive: Callable[..., Driver],
    write_adapter: Callable[..., tuple[Path, PreTrainedModel]],
    reference_logprobs: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
) -> None:
    monkeypatch.setattr(scheduler, "SCORED_TOKENS", 48)
    model = build_model("qwen3-gqa")
    driver = drive(model, max_prefill_tokens=chunk, num_blocks=24)
    folder, merged = write_adapter(model, 1)
    number = load(driver, folder)
    prompt = torch.randint(0, 50, (130,), generator=torch.Generator().manual_seed(3)).tolist()
    targets = [[token, (token + 1) % 50, -1] for token in prompt[1:]]
    cases = [(PromptScoring(top_k=3, targets=targets, num_draws=4), 1), (PromptScoring(first=100, top_k=2), 100)]
    driver.add(prompt, adapter=number)
    driver.run()  # the prefix cache knows the prompt
    for scoring, first in cases:
        sequence = driver.add(prompt, adapter=number, scoring=scoring, max_new_tokens=2, temperature=0.7)
        driver.add(prompt, adapter=number, max_new_tokens=100)  # the two do not fit into the cache
        driver.run()
        assert sequence.num_cached == (0 if first == 1 else 96)
        scores, expected = sequence.scores, reference_logprobs(merged, prompt)[:-1]
        assert all(math.isnan(logprob) for logprob in scores.logprobs[:first])
        ours = expected.gather(1, torch.tensor(prompt[1:])[:, None])[first - 1 :, 0]
        assert torch.allclose(torch.tensor(scores.logprobs[first:]), ours, atol=1e-4)
        assert len(scores.top) == len(prompt)
        for place in range(first, len(prompt)):
            values, ids = expected[place - 1].topk(scoring.top_k)
            assert [token for token, _ in scores.top[place]] == ids.tolist()
            assert [value for _, value in scores.top[place]] == pytest.approx(values.tolist(), abs=1e-4)
            for token, value in scores.draws[place] if scoring.num_draws else ():
                assert value == pytest.approx(expected[place - 1, token].item(), abs=1e-4)
        for place, row in enumerate(scoring.targets):
            wanted = [expected[place, token].item() if token >= 0 else 0.0 for token in row]
            assert scores.targets[place] == pytest.approx(wanted, abs=1e-4)


async def test_what_a_request_can_ask_for(served: Any, build_model: Any, reference_logprobs: Any) -> None:
    model = build_model("qwen3-gqa")
    answer = await served.generate(logprob_start_len=0, top_logprobs_num=2, prompt_targets=[[9, -1]], prompt_draws=3)
    meta, expected = answer["meta_info"], reference_logprobs(model, PROMPT)
    assert [entry[1:] for entry in meta["input_token_logprobs"]] == [[token, None] for token in PROMPT]
    values = [entry[0] for entry in meta["input_token_logprobs"]]
    assert values[0] is None
    assert values[1:] == pytest.approx([expected[i, token].item() for i, token in enumerate(PROMPT[1:])], abs=1e-5)
    assert [len(place) for place in meta["input_top_logprobs"]] == [0, 2, 2, 2, 2]
    assert [len(place) for place in meta["input_draw_logprobs"]] == [0, 3, 3, 3, 3]
    assert meta["input_target_logprobs"] == [[pytest.approx(expected[0, 9].item(), abs=1e-5), 0.0]]
    assert "input_token_logprobs" not in (await served.generate())["meta_info"]
    # Log-probabilities at temperature 1, whatever the temperature.
    drawn = {"max_new_tokens": 20, "temperature": 0.3, "sampling_seed": 1}
    plain, raw, special = [
        await served.generate(sampling_params=drawn | more)
        for more in ({}, {"raw_logprobs": True}, {"raw_logprobs": True, "top_k": 49})
    ]
    assert raw["output_ids"] == plain["output_ids"]
    for each in (raw, special):
        ids = PROMPT + each["output_ids"]
        exact = [reference_logprobs(model, ids)[i, ids[i + 1]].item() for i in range(len(PROMPT) - 1, len(ids) - 1)]
        assert [entry[0] for entry in each["meta_info"]["output_token_logprobs"]] == pytest.approx(exact, abs=1e-4)
    whole = await served.generate(sampling_params={"max_new_tokens": None})
    assert whole["meta_info"]["completion_tokens"] == 240 - len(PROMPT)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, {4}),
        ({"stop_token_ids": [2]}, {2, 4}),
        ({"stop_token_ids": [2], "only_stops": True}, {2}),
        ({"only_stops": True}, set()),
        ({"stop_token_ids": [2], "ignore_eos": True}, set()),
    ],
)
def test_which_tokens_end_an_answer(params: dict[str, Any], expected: set[int]) -> None:
    limits = RequestLimits(vocab_size=5, context_length=64, default_stop_ids=frozenset({4}), has_tokenizer=False)
    parser = BodyParser(limits, None, lambda: 0, records_experts=False)
    params |= {"stop_token_ids": frozenset(params.get("stop_token_ids", ()))}
    body = GenerateBody(input_ids=[0], sampling_params=SamplingParams(**params))
    assert parser._params(body).stop_token_ids == expected


@pytest.mark.parametrize(
    "body",
    [
        {"top_logprobs_num": 1},
        {"logprob_start_len": 6},
        {"logprob_start_len": 0, "prompt_targets": [[1]] * 5},
        {"logprob_start_len": 0, "prompt_targets": [[50]]},
        {"logprob_start_len": 0, "prompt_targets": [[-2]]},
        {"logprob_start_len": 0, "prompt_draws": 1025},
    ],
    ids=str,
)
async def test_scoring_that_does_not_fit_is_refused(served: Any, body: dict[str, Any]) -> None:
    assert (await served.generate(400, **body))["code"] == "request.invalid_field"


def test_graphs_are_of_the_base_model(
    build_model: Callable[..., PreTrainedModel],
    drive: Callable[..., Driver],
    write_adapter: Callable[..., tuple[Path, PreTrainedModel]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step with an adapter has no graph, and leaves nothing for the next one."""
    model = build_model("qwen3-gqa")
    folder, _ = write_adapter(model, 1)
    result: list[list[Any]] = []
    for is_graphed in (False, True):
        if is_graphed:
            with_graphs(monkeypatch)
        driver = drive(model)
        lengths = (0, 20), (load(driver, folder), 4)
        result.append([driver.add(PROMPT, adapter=number, max_new_tokens=count) for number, count in lengths])
        driver.run()
    for plain, graphed in zip(*result, strict=True):
        assert graphed.answer_ids == plain.answer_ids
        assert graphed.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
