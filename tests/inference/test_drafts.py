"""Drafts: answers, log-probabilities and distributions are those without drafts; they pay or are switched off."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from areal.api.config import NativeServerConfig
from areal.api.errors import ConfigError
from areal.inference.drafts import Drafts, History, Payoff, num_accepted
from areal.inference.engine import _drafts
from areal.inference.scheduler import Sequence
from tests.inference.conftest import VOCABULARY


class Guesses(Drafts):
    """Drafts whose tokens are right, wrong or random, in turn, in every step."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        super().__init__()
        self._right, self._random = answers, random.Random(seed)
        self.payoff.price = lambda count: 0.0

    def proposed(self, tokens: list[int], price: float) -> tuple[list[int], int]:
        super().proposed(tokens, price)
        whole = next((item for item in self._right.values() if item[: len(tokens)] == tokens), [])
        draft = whole[len(tokens) : len(tokens) + self._random.randrange(9)]
        if draft and self._random.random() < 0.5:
            draft[self._random.randrange(len(draft))] = self._random.randrange(VOCABULARY)
        return draft + [self._random.randrange(VOCABULARY)] * self._random.randrange(2), 2


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "warm": {"temperature": 0.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.3, "top_p": 0.8},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3},
    "sampled-penalties": {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": -0.4},
    "minimum": {"temperature": 1.0, "min_new_tokens": 9, "stop_token_ids": list(range(0, 20))},
    "stops": {"temperature": 1.0, "stop_token_ids": [7, 8, 9]},
}


class Letters:
    """A detokenizer with one letter for each token."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(65 + token) for token in token_ids)


def answers_of(driver, prompts, kinds) -> list[Sequence]:
    each = [
        driver.add(prompt, group_id=str(number), seed=number, **{"max_new_tokens": 24, **REQUESTS[kind]})
        for number, prompt in enumerate(prompts)
        for kind in kinds
    ]
    driver.run()
    return each


def assert_equal_answers(result: list[Sequence], wanted: list[Sequence]) -> None:
    for item, other in zip(result, wanted, strict=True):
        assert (item.token_ids, item.finish) == (other.token_ids, other.finish)
        assert item.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert item.version_starts == other.version_starts


@pytest.mark.parametrize("family", ["qwen3-gqa", "qwen2-windows", "gemma2", "gpt_oss", "deepseek_v3"])
def test_answers_are_those_without_drafts(build_model, drive, prompts, family):
    """Greedy and sampled, with the same seeds: the tokens, why they end, log-probabilities and versions."""
    model = build_model(family)
    kinds = list(REQUESTS) if family == "qwen3-gqa" else ["greedy", "sampled", "stops"]
    wanted = answers_of(drive(model, num_blocks=400, max_running=80), prompts, kinds)
    drafts = Guesses({tuple(item.token_ids): item.token_ids for item in wanted})
    driver = drive(model, num_blocks=400, max_running=80, drafts=drafts)
    assert_equal_answers(answers_of(driver, prompts, kinds), wanted)
    scheduler = driver.engine.scheduler
    assert 0 < scheduler.num_accepted_tokens < scheduler.num_drafted_tokens
    assert driver.engine.counters.generated_tokens == sum(item.num_output for item in wanted)
    assert not drafts._answers
    assert not drafts._histories


@pytest.mark.parametrize("num_blocks", [16, 9])
def test_drafts_take_no_block_from_an_answer(build_model, drive, prompts, num_blocks):
    """With few blocks, where sequences are preempted."""
    model = build_model("qwen3-gqa")
    wanted = answers_of(drive(model), prompts, ["greedy", "sampled"])
    drafts = Guesses({tuple(item.token_ids): item.token_ids for item in wanted})
    driver = drive(model, num_blocks=num_blocks, drafts=drafts)
    assert_equal_answers(answers_of(driver, prompts, ["greedy", "sampled"]), wanted)
    assert driver.engine.scheduler.num_preemptions > 0
    assert driver.engine.scheduler.num_accepted_tokens > 0


def test_siblings_forked_from_one_prompt_draft_from_each_other(build_model, drive, prompts):
    model = build_model("llama")

    def answers(drafts):
        driver = drive(model, drafts=drafts)
        each = [driver.add(prompts[3], group_id="group", max_new_tokens=30) for _ in range(3)]
        driver.steps(6)
        each += [driver.add(prompts[3], group_id="group", max_new_tokens=30, temperature=0.3, seed=5)]
        driver.run()
        return driver, each

    drafts = Drafts()
    drafts.payoff.price = lambda count: 0.01
    plain, wanted = answers(None)
    driver, actual = answers(drafts)
    assert_equal_answers(actual, wanted)
    assert driver.engine.scheduler.num_accepted_tokens > 10
    assert driver.engine.counters.steps < plain.engine.counters.steps


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_weight_update_between_two_steps(build_model, drive, prompts, mode):
    """Each token has the version and the log-probability of the weights that drew it."""
    old, new = build_model("llama", 0), build_model("llama", 1)
    driver = drive(old, drafts=(drafts := Drafts()))
    drafts.payoff.price = lambda count: 0.0
    each = [driver.add(prompt, max_new_tokens=40, temperature=0.5, seed=3) for prompt in prompts]
    driver.steps(4)
    for name, tensor in new.state_dict().items():
        driver.engine.weights.receive_value(name, tensor)
    driver.engine.install_weights("1", mode)
    counts = [entry.num_output for entry in each]
    driver.run()
    for sequence, count in zip(each, counts, strict=True):
        assert sequence.version_spans(0, 40) == [("0", 0, count), ("1", count, 40)]
        with torch.no_grad():
            scores = (new(torch.tensor([sequence.token_ids])).logits[0].float() / 0.5).log_softmax(-1)
        if mode == "retract":
            wanted = [
                scores[at - 1, sequence.token_ids[at]].item() for at in range(sequence.num_prompt + count, len(scores))
            ]
            assert sequence.logprobs[count:] == pytest.approx(wanted, abs=1e-4)
    assert driver.engine.scheduler.num_accepted_tokens > 0


def test_the_end_may_be_inside_an_accepted_draft(build_model, drive, prompts):
    """A stop token, a stop string, and the maximum."""
    model = build_model("qwen2-tied")
    plain = drive(model, detokenizer=Letters())
    whole = plain.add(prompts[1], max_new_tokens=30)
    plain.run()
    answer = whole.token_ids[whole.num_prompt :]
    place = next(at for at in range(6, 30) if answer[at] not in answer[:at])
    text = Letters().decode(answer[place - 1 : place + 1])
    for params in ({"stop_token_ids": [answer[place]]}, {"stop": [text]}, {"max_new_tokens": place + 1}):
        drafts = Drafts()
        drafts.payoff.price = lambda count: 0.0
        drafts.proposed = lambda tokens, price: (whole.token_ids[len(tokens) :][:12], 4)
        driver = drive(model, detokenizer=Letters(), drafts=drafts)
        result = driver.add(prompts[1], **{"max_new_tokens": 30, **params})
        driver.run()
        assert result.token_ids == whole.token_ids[: whole.num_prompt + place + 1]
        assert result.finish is not None
        assert result.finish.kind == ("length" if "max_new_tokens" in params else "stop")
        assert driver.engine.counters.generated_tokens == place + 1 == len(result.logprobs)
        assert driver.engine.counters.steps < place


@pytest.mark.parametrize("kind", ["sampled", "top_p", "sampled-penalties"])
def test_the_distribution_is_that_without_drafts(build_model, drive, kind):
    """Chi-square over the second and third token of many answers, whatever is proposed."""
    model, size = build_model("llama"), 6
    counts = []
    for drafts in (None, Drafts()):
        if drafts is not None:
            drafts.payoff.price = lambda count: 0.0
            drafts.proposed = lambda tokens, price: ([tokens[0], tokens[1]], 2)
        driver = drive(model, num_blocks=2048, max_running=1024, max_prefill_tokens=4096, drafts=drafts)
        first = 0 if drafts is None else 10**6
        each = [
            driver.add([4, 9, 3], group_id="g", seed=first + n, max_new_tokens=3, **REQUESTS[kind]) for n in range(1000)
        ]
        driver.run()
        likely = counts[0][1] if counts else None
        tokens = [item.token_ids[4] for item in each]
        if likely is None:
            likely = sorted(set(tokens), key=tokens.count)[-size:]
        counts.append(([tokens.count(token) for token in likely], likely))
    (plain, _), (drafted, _) = counts
    statistic = sum((a - b) ** 2 / (a + b) for a, b in zip(plain, drafted, strict=True))
    assert statistic < 24.3  # chi-square of six cells: .9995


@pytest.mark.parametrize("family", ["qwen3-gqa", "qwen2-windows"])
def test_a_refused_draft_without_finite_keys_ends_no_answer(build_model, drive, prompts, family):
    """A token whose weights are NaN is proposed in every step, and its keys stay in no block."""
    model = build_model(family)
    with torch.no_grad():
        model.get_input_embeddings().weight[45] = torch.nan
    wanted = answers_of(drive(model), prompts, ["minimum"])

    class Bad(Guesses):
        def proposed(self, tokens: list[int], price: float) -> tuple[list[int], int]:
            draft, matched = super().proposed(tokens, price)
            return [*draft[:2], 45, 3], matched

    driver = drive(model, drafts=Bad({tuple(item.token_ids): item.token_ids for item in wanted}))
    assert_equal_answers(answers_of(driver, prompts, ["minimum"]), wanted)
    assert driver.engine.scheduler.num_drafted_tokens
    assert all(cache.blocks.isfinite().all() for cache in driver.engine.runner._caches.values())


def test_what_is_proposed():
    earlier = [[1, 2, 3, 4, 5], [9, 2, 3, 6, 7]]
    history = History(earlier)
    tokens = [8, 1, 2, 3]
    history.add(tokens, 0)
    history.catch_up()
    assert history.proposed(tokens) == ([4, 5], 3)
    tokens += [6]
    history.catch_up()
    assert history.proposed(tokens) == ([7], 3)
    tokens += [5, 6, 5, 6]
    history.catch_up()
    assert history.proposed(tokens) == ([5, 6] * 7 + [5], 3)  # a repetition is continued
    history.complete(tokens)
    assert History([]).proposed([1]) == ([], 0)


@pytest.mark.parametrize(("draft", "drawn", "count"), [([], [4], 0), ([1, 2], [1, 3, 5], 1), ([1, 2], [1, 2, 5], 2)])
def test_how_many_are_accepted(draft, drawn, count):
    assert num_accepted(draft, drawn) == count


def test_answers_of_an_earlier_epoch_are_kept():
    drafts, prompt = Drafts(), [1, 2, 3]
    for answer in ([4, 5, 6, 7], [4, 5, 8]):
        tokens = list(prompt)
        drafts.begin(tokens, 3)
        tokens += answer
        drafts.end(tokens, is_sound=True)
    again = [*prompt, 4]
    drafts.begin(again, 3)
    assert drafts.proposed(again, 0.0)[0] == [5, 8]
    other = [3, 3, 4]
    drafts.begin(other, 2)
    assert drafts.proposed(other, 0.0) == ([], 0)
    drafts.end(list(prompt), is_sound=True)  # of no started answer


def test_old_answers_are_forgotten(monkeypatch):
    monkeypatch.setattr("areal.inference.drafts._KEPT_TOKENS", 300)
    drafts = Drafts()
    for number in range(40):
        tokens = [number, number]
        drafts.begin(tokens, 2)
        tokens += [5] * 30
        drafts.end(tokens, is_sound=True)
    assert drafts._num_kept == 282 == sum(len(item) + 64 for each in drafts._earlier.values() for item in each)
    assert len(drafts._earlier) == 3


@pytest.mark.parametrize(
    ("chance", "row_s", "does_pay"), [(0.9, 0.001, True), (0.5, 0.02, True), (0.05, 0.04, False), (0.5, 0.3, False)]
)
def test_drafts_that_do_not_pay_are_switched_off(chance, row_s, does_pay):
    """With steps of 0.1 s: the tokens per second are close to the better of always and never."""
    payoff, draws = Payoff(), random.Random(1)
    tokens, seconds, drafted = 0, 0.0, 0
    for _ in range(3000):
        length = payoff.length(2, payoff.price(1))
        accepted = next((place for place in range(length) if draws.random() >= chance), length)
        if length:
            payoff.note_draft(2, length, accepted)
        payoff.note_step(1, length, 1 + accepted, step_s := 0.1 + row_s * length)
        tokens, seconds, drafted = tokens + 1 + accepted, seconds + step_s, drafted + length
    best = max(sum(chance**place for place in range(length + 1)) / (0.1 + row_s * length) for length in range(16))
    assert tokens / seconds > 0.95 * best
    assert (drafted > 1000) == does_pay


def test_a_model_whose_states_cannot_go_back_refuses_drafts(build_model, drive):
    config = NativeServerConfig(speculation="group")
    with pytest.raises(ConfigError, match=r"native\.speculation=group") as caught:
        _drafts(config, drive(build_model("bamba")).engine.runner)
    assert caught.value.code == "model.unsupported"
    assert _drafts(config, drive(build_model("llama")).engine.runner) is not None


def test_answers_without_a_token_or_with_an_error_are_not_kept():
    drafts = Drafts()
    for number, (answer, is_sound) in enumerate([([], True), ([7], False), ([7], True)]):
        tokens = [number]
        drafts.begin(tokens, 1)
        tokens += answer
        drafts.end(tokens, is_sound=is_sound)
    assert [list(item) for each in drafts._earlier.values() for item in each] == [[7]]


def test_a_prompt_that_always_has_a_running_answer_needs_bounded_memory(monkeypatch):
    monkeypatch.setattr("areal.inference.drafts._KEYS", 100)
    history = History([])
    for number in range(50):
        tokens = list(range(20 * number, 20 * number + 20))
        history.add(tokens, 0)
        history.complete(tokens)
    assert len(history._places) <= 102
