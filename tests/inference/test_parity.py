"""The native engine against transformers: the same tokens, the same log-probabilities, however work is cut."""

from __future__ import annotations

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, PhimoeConfig, PhimoeForCausalLM

from areal.api.errors import ConfigError
from tests.inference.conftest import FAMILIES

TOLERANCE = 1e-5


def check_logprobs(sequence, reference, temperature: float = 1.0, tolerance: float = TOLERANCE) -> None:
    for place, logprob in enumerate(sequence.logprobs):
        position = sequence.num_prompt + place
        expected = reference[position - 1, sequence.token_ids[position]].item()
        assert logprob == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("family", "max_prefill_tokens"), [*((family, 16) for family in FAMILIES), ("llama", 512), ("mistral-window", 512)]
)
def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    family, max_prefill_tokens, build_model, drive, prompts, reference_logprobs
):
    model = build_model(family)
    driver = drive(model, max_running=4, max_prefill_tokens=max_prefill_tokens)
    sequences = [driver.add(prompt, max_new_tokens=20) for prompt in prompts]
    driver.run()
    for sequence, prompt in zip(sequences, prompts, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )
        assert sequence.token_ids == expected[0].tolist()
        check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))


def test_sampled_logprobs_are_those_at_the_temperature(build_model, drive, prompts, reference_logprobs):
    model = build_model("qwen3-gqa")
    driver = drive(model)
    settings = [{"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.5}, {"temperature": 0.7, "top_k": 3}]
    settings += [{"temperature": 0.7, "frequency_penalty": 1.0}, {"temperature": 0.7, "top_k": 1}]
    sequences = [driver.add(prompts[1], seed=n, max_new_tokens=12, **item) for n, item in enumerate(settings)]
    driver.run()
    for sequence, each in zip(sequences, settings, strict=True):
        reference = reference_logprobs(model, sequence.token_ids, each["temperature"])
        check_logprobs(sequence, reference, each["temperature"])


def test_bfloat16_runs_close_to_transformers(build_model, drive, prompts, reference_logprobs):
    model = build_model("qwen2-tied").to(torch.bfloat16)
    driver = drive(model)
    sequence = driver.add(prompts[3], temperature=1.0, max_new_tokens=10)
    driver.run()
    check_logprobs(sequence, reference_logprobs(model, sequence.token_ids), tolerance=0.5)
    assert driver.engine.runner.bytes_per_token == 2 * 2 * 2 * 8 * 2  # layers, k and v, heads, size, bytes


def test_a_request_does_not_depend_on_what_else_runs(build_model, drive, prompts):
    model = build_model("qwen3-gqa")
    alone = []
    for number, prompt in enumerate(prompts):
        driver = drive(model)
        alone.append(driver.add(prompt, temperature=1.0, seed=100 + number, max_new_tokens=16))
        driver.run()
    crowd = drive(model, max_running=5, max_prefill_tokens=24)
    together = [
        crowd.add(prompt, temperature=1.0, seed=100 + number, max_new_tokens=16)
        for number, prompt in reversed(list(enumerate(prompts)))
    ]
    crowd.run()
    assert [s.token_ids for s in alone] == [s.token_ids for s in reversed(together)]
    for item, other in zip(alone, reversed(together), strict=True):
        assert item.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


def test_many_rows_are_cut_into_groups_of_similar_length(build_model, drive, reference_logprobs):
    model = build_model("qwen3-gqa")
    driver = drive(model, num_blocks=400, max_running=40)
    driver.engine.runner._group_bytes = 8 * driver.engine.runner._row_bytes
    generator = torch.Generator().manual_seed(3)
    sequences = [
        driver.add(torch.randint(0, 50, (1 + 3 * n,), generator=generator).tolist(), max_new_tokens=20)
        for n in range(30)
    ]
    driver.run()
    for sequence in sequences:
        check_logprobs(sequence, reference_logprobs(model, sequence.token_ids))


def test_a_model_without_the_attention_interface_is_refused(drive):
    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(ConfigError, match="MambaForCausalLM") as error:
        drive(MambaForCausalLM(config))
    assert error.value.code == "model.unsupported"


def test_a_model_whose_layers_do_not_pass_their_window_is_refused(drive):
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = PhimoeConfig(**sizes, intermediate_size=16, num_key_value_heads=2, num_local_experts=2, sliding_window=8)
    with pytest.raises(ConfigError, match="sliding window of None") as error:
        drive(PhimoeForCausalLM(config))
    assert error.value.code == "model.unsupported"
