"""However an answer is cut into parts, it is the answer that was asked for."""

from __future__ import annotations

import base64
import dataclasses
import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.api.columns import ExpertShape, RoutedExperts
from areal.api.config.rollout import GenerationHyperparameters
from areal.api.data import GenerationRequest
from areal.api.errors import RequestError, ServerUnavailable
from areal.fleet.fleet import Answer, token_budget
from areal.fleet.replica import AnswerForm, PartChunk, RequestLimits
from areal.fleet.server_client import experts_of, prior_output_bias, versions_of
from areal.inference.decode_rows import SampledRows
from areal.inference.engine import _adjusted, sample
from areal.inference.scheduler import ALL_TOKENS, SamplingParams, Sequence


def a_request(num_prompt: int = 3, **gconfig: object) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        input_ids=list(range(num_prompt)),
        gconfig=GenerationHyperparameters(**gconfig),  # type: ignore[arg-type]
    )


def chunk(*token_ids: int, version: int = 0, finish: str | None = None) -> PartChunk:
    count = len(token_ids)
    return PartChunk(list(token_ids), [-1.0] * count, [version] * count, finish)  # type: ignore[arg-type]


@given(
    budget=st.integers(1, 60),
    minimum=st.integers(0, 80),
    cuts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), max_size=40),
)
def test_parts_add_up_to_the_whole_budget(budget: int, minimum: int, cuts: list[tuple[int, int]]) -> None:
    answer = Answer(a_request(max_new_tokens=budget, min_new_tokens=minimum), AnswerForm(stream_interval=8))
    expected: list[int] = []
    for part_index, (size, replica) in enumerate([*cuts, (budget, 0)]):
        if answer.stop_reason is not None:
            break
        part = answer.next_part(f"server-{replica}")
        assert part.input_ids == [0, 1, 2, *expected]
        assert part.num_prior_output_tokens == len(expected)
        assert part.gconfig.max_new_tokens == budget - len(expected) > 0
        assert part.gconfig.min_new_tokens <= part.gconfig.max_new_tokens
        assert part.gconfig.min_new_tokens == max(0, min(minimum, budget) - len(expected))
        made = list(range(len(expected), min(len(expected) + size, budget)))
        answer.add(chunk(*made, version=part_index, finish=None if len(expected) + size < budget else "length"))
        answer.end_part(99)
        expected += made
    response = answer.response()
    assert response.output_ids == expected == list(range(budget))
    assert response.output_versions == sorted(response.output_versions)
    assert response.stop_reason == "length"
    assert all(a != b for a, b in zip(response.replicas, response.replicas[1:], strict=False))


def test_the_bound_on_prompt_and_answer_together_counts() -> None:
    assert token_budget(GenerationHyperparameters(max_new_tokens=10, max_tokens=8), 3) == 5
    assert token_budget(GenerationHyperparameters(max_new_tokens=4, max_tokens=8), 3) == 4
    with pytest.raises(RequestError, match=r"gconfig\.max_tokens=8") as error:
        token_budget(GenerationHyperparameters(max_tokens=8), 8)
    assert error.value.code == "request.too_long"


@pytest.mark.parametrize(
    ("gconfig", "finished"),
    [
        ({"stop_token_ids": [9]}, True),
        ({"stop_token_ids": [9], "ignore_eos": True}, False),
        ({"stop_token_ids": [9], "min_new_tokens": 3}, False),
        ({}, False),
    ],
)
def test_a_stop_token_ends_an_answer_without_its_last_chunk(gconfig: dict, finished: bool) -> None:
    answer = Answer(a_request(**gconfig), AnswerForm(stream_interval=8))
    answer.next_part("server-0")
    answer.add(chunk(5, 9))
    answer.end_part(99)
    assert (answer.stop_reason is not None) == finished


def test_a_replica_that_breaks_the_protocol_is_noticed() -> None:
    answer = Answer(a_request(max_new_tokens=2), AnswerForm(stream_interval=8))
    answer.next_part("server-0")
    with pytest.raises(ServerUnavailable, match="server-0") as error:
        answer.add(chunk(1, 2, 3))
    assert error.value.code == "server.unreadable_answer"
    with pytest.raises(ServerUnavailable, match=r"\b1 .*\b0 .*\b1 ") as error:
        answer.add(PartChunk([1], [], [0], None))
    assert error.value.code == "server.unreadable_answer"


def test_of_a_chunk_with_unusable_numbers_nothing_is_kept() -> None:
    answer = Answer(a_request(max_new_tokens=8), AnswerForm(stream_interval=8))
    answer.next_part("server-0")
    answer.add(chunk(1))
    for wrong in (PartChunk([2, 2**31], [0.0, 0.0], [0, 0], None), PartChunk([2, 3], [0.0, None], [0, 0], None)):  # pyright: ignore[reportArgumentType]
        with pytest.raises(ServerUnavailable) as error:
            answer.add(wrong)
        assert error.value.code == "server.unreadable_answer"
    answer.add(chunk(4))
    result = answer.response()
    assert (result.output_ids, len(result.output_logprobs), len(result.output_versions)) == ([1, 4], 2, 2)


@pytest.mark.parametrize(
    ("token_id", "logprob", "version"),
    [
        (-1, -1.0, 3),
        (100, -1.0, 3),
        (5, math.nan, 3),
        (5, math.inf, 3),
        (5, -math.inf, 3),
        (5, 0.5, 3),
        (5, -1.0, 4),
        (5, -1.0, -2),
    ],
)
@pytest.mark.parametrize("finish", ["stop", None])
def test_a_part_with_a_number_that_no_trainer_can_use_is_dropped(token_id, logprob, version, finish) -> None:
    answer = Answer(a_request(max_new_tokens=8), AnswerForm(stream_interval=8))
    answer.check(RequestLimits(vocab_size=100, context_length=99))
    answer.next_part("server-0")
    answer.add(PartChunk([99, 0], [0.0005, -9999.0], [-1, -1] if version < -1 else [3, 3], "abort"))
    assert answer.end_part(3) == ""
    if version < -1:
        answer = Answer(a_request(max_new_tokens=8), AnswerForm(stream_interval=8))
    answer.next_part("server-1")
    answer.add(PartChunk([7, token_id, 8], [-1.0, logprob, -1.0], [version] * 3, finish))
    assert answer.end_part(3).startswith("server-1 sent ")
    assert answer.stop_reason is None
    assert answer.response().output_ids == ([] if version < -1 else [99, 0])


def test_version_spans_are_expanded_to_one_per_token() -> None:
    assert versions_of([(4, 0, 3)], 3) == [4, 4, 4]
    assert versions_of([(4, 0, 2), (5, 2, 2), (6, 2, 3)], 3) == [4, 4, 6]
    for wrong in ([(4, 0, 2)], [(4, 0, 1), (5, 2, 3)], [(4, 1, 3)], [(4, 0, 4)], []):
        with pytest.raises(ValueError):  # noqa: PT011 - its caller adds the code
            versions_of(wrong, 3)


def told(chunk: PartChunk, part_versions: list[int]) -> PartChunk:
    return chunk._replace(part_versions=part_versions)


def test_final_versions_replace_estimated_ones() -> None:
    answer = Answer(a_request(max_new_tokens=8), AnswerForm(stream_interval=2))
    answer.next_part("server-0")
    answer.add(chunk(1, 2, version=3))
    answer.add(told(chunk(3, finish="abort"), [3, 3, 4]))
    assert answer.newest_version == 4
    answer.next_part("server-1")
    answer.add(chunk(4, 5, version=4))
    answer.add(chunk(6, 7, version=4))
    answer.add(told(chunk(8, version=4, finish="length"), [4, 5, 5, 6, 6]))
    response = answer.response()
    assert response.output_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert response.output_versions == [3, 3, 4, 4, 5, 5, 6, 6]
    assert response.stop_reason == "length"


def test_estimated_versions_that_are_too_new_are_corrected() -> None:
    answer = Answer(a_request(), AnswerForm(stream_interval=2))
    answer.next_part("server-0")
    answer.add(chunk(1, 2, version=9))
    answer.add(told(chunk(finish="stop"), [7, 8]))
    assert answer.response().output_versions == [7, 8]


@pytest.mark.parametrize("wrong", [[0], [0, 0, 0, 0], []])
def test_a_part_with_a_wrong_number_of_versions_is_discarded(wrong: list[int]) -> None:
    answer = Answer(a_request(), AnswerForm(stream_interval=2))
    answer.next_part("server-0")
    answer.add(told(chunk(1, finish="abort"), [0]))
    answer.next_part("server-1")
    answer.add(chunk(2, 3))
    with pytest.raises(ServerUnavailable, match=rf"server-1 .*\b{len(wrong)} .*\b3 ") as error:
        answer.add(told(chunk(4, finish="stop"), wrong))
    assert error.value.code == "server.unreadable_answer"
    assert answer.stop_reason is None
    assert answer.next_part("server-2").input_ids == [0, 1, 2, 1]


def test_final_versions_below_earlier_parts_are_an_error() -> None:
    answer = Answer(a_request(), AnswerForm(stream_interval=2))
    answer.next_part("server-0")
    answer.add(told(chunk(1, 2, finish="abort"), [4, 5]))
    answer.next_part("server-1")
    answer.add(chunk(3, 4, version=5))
    with pytest.raises(ServerUnavailable, match=r"server-1 .*\b4, .*\b5") as error:
        answer.add(told(chunk(5, version=5, finish="length"), [5, 4, 5]))
    assert error.value.code == "server.unreadable_answer"
    assert answer.stop_reason is None
    assert answer.next_part("server-2").input_ids == [0, 1, 2, 1, 2, 3]
    assert answer.newest_version == 5


@pytest.mark.parametrize(
    "gconfig",
    [
        {"frequency_penalty": 1.3},
        {"frequency_penalty": -0.7, "temperature": 0.6, "top_p": 0.9},
        {"frequency_penalty": 0.4, "top_k": 5, "min_new_tokens": 7, "stop_token_ids": [2, 6]},
        {"frequency_penalty": 0.4, "top_k": 5, "min_new_tokens": 8, "stop_token_ids": [2, 6]},
        {"frequency_penalty": 0.9, "greedy": True},
    ],
    ids=str,
)
def test_a_server_that_counts_prior_output_as_prompt_keeps_the_distribution(gconfig: dict) -> None:
    """The native sampler, which counts prior output by itself, is the measure."""
    generator = torch.Generator().manual_seed(1)
    output = torch.randint(0, 12, (7,), generator=generator).tolist()
    logits = torch.randn(64, 12, generator=generator) * 3
    for cut in (0, 1, 4, 7):
        answer = Answer(a_request(**gconfig), AnswerForm(stream_interval=8))
        answer.next_part("server-0")
        answer.add(chunk(*output[:cut], finish="abort"))
        part = answer.next_part("server-1")
        bias = torch.zeros(12)
        for token, value in prior_output_bias(part).items():
            bias[token] = value
        foreign = [a_sequence(part.input_ids + output[cut:], len(part.input_ids), row, part) for row in range(64)]
        unbroken = [a_sequence([0, 1, 2, *output], 3, row, answer.request) for row in range(64)]
        tables = (SampledRows.of(foreign, logits.device), SampledRows.of(unbroken, logits.device))
        adjusted = _adjusted(logits + bias, tables[0]), _adjusted(logits, tables[1])
        torch.testing.assert_close(adjusted[0].softmax(-1), adjusted[1].softmax(-1), rtol=1e-5, atol=1e-7)
        drawn = [
            sample(scores, SampledRows.of(rows, scores.device)).tokens.tolist()
            for scores, rows in ((logits + bias, foreign), (logits, unbroken))
        ]
        assert drawn[0] == drawn[1]


def a_sequence(token_ids: list[int], num_prompt: int, seed: int, part: GenerationRequest) -> Sequence:
    """As an engine sees it that was asked for `part`."""
    gconfig = part.gconfig
    params = SamplingParams(
        min_new_tokens=gconfig.min_new_tokens,
        temperature=0.0 if gconfig.greedy else gconfig.temperature,
        top_p=gconfig.top_p,
        top_k=ALL_TOKENS if gconfig.top_k > 100 else gconfig.top_k,
        frequency_penalty=gconfig.frequency_penalty,
        stop_token_ids=frozenset(gconfig.stop_token_ids),
    )
    sequence = Sequence(request_id="r", token_ids=list(token_ids), num_prompt=num_prompt, params=params, seed=seed)
    sequence.logprobs += [0.0] * (len(token_ids) - num_prompt)
    return sequence


def test_without_penalty_or_prior_output_there_is_no_bias() -> None:
    answer = Answer(a_request(frequency_penalty=1.0), AnswerForm(stream_interval=8))
    assert prior_output_bias(answer.next_part("server-0")) == {}
    answer.add(chunk(5, 5, 6, finish="abort"))
    assert prior_output_bias(answer.next_part("server-0")) == {5: -2.0, 6: -1.0}
    answer = Answer(a_request(), AnswerForm(stream_interval=8))
    answer.next_part("server-0")
    answer.add(chunk(5, finish="abort"))
    assert prior_output_bias(answer.next_part("server-0")) == {}


@dataclasses.dataclass(frozen=True)
class PartPlan:
    """What one replica does with the part it is asked for."""

    tells: str
    """When versions are told: with each chunk, at the end, or never (the client tracks them, one chunk late)."""
    interval: int
    """Tokens per chunk; 0 = the answer comes in one piece."""
    num_tokens: int
    new_version_at: int
    """Tokens of the part after which the server holds the next version."""
    end: str
    goes_back_by: int
    """How far the trainer goes back after the part."""


PLANS = st.builds(
    PartPlan,
    tells=st.sampled_from(["chunk", "end", "never"]),
    interval=st.integers(0, 4),
    num_tokens=st.integers(0, 9),
    new_version_at=st.integers(0, 9),
    end=st.sampled_from(["abort", "death", "older", "too many", "wrong length"]),
    goes_back_by=st.integers(0, 2),
)


class World:
    """The policy that servers hold. The token at output place p is p, its log-probability -p."""

    def __init__(self) -> None:
        self.version = 3
        self.true_versions: list[int] = []
        """Of the tokens of the part that was played last."""
        self.told_all = False
        """Its last chunk came, from a server that tells the truth about versions."""

    def play(self, plan: PartPlan, part: GenerationRequest, answer: Answer) -> None:
        """What a replica of the plan's kind sends for a part."""
        start, tracked = part.num_prior_output_tokens, self.version
        count = min(plan.num_tokens, part.gconfig.max_new_tokens)
        true = self.true_versions = []
        self.told_all = False
        for index in range(count):
            self.version += index == plan.new_version_at
            true.append(self.version)
        if plan.end == "older" and count:
            true[-1] = 1
        size = plan.interval or max(count, 1)
        cuts = [true[place : place + size] for place in range(0, count, size)]
        if count < part.gconfig.max_new_tokens:
            cuts.append([])  # the last chunk says that it was aborted
        for number, versions in enumerate(cuts):
            places = range(start, start + len(versions))
            start += len(versions)
            shown = versions if plan.tells == "chunk" else [tracked] * len(versions)
            tracked = max([tracked, *versions])
            piece = PartChunk(list(places), [-float(place) for place in places], shown, None)
            if number == len(cuts) - 1:
                if plan.end == "death":
                    raise ServerUnavailable("it died before its last chunk")
                piece = piece._replace(finish_reason="abort" if not versions else "length")
                if plan.tells == "end":
                    piece = told(piece, true[1:] if plan.end == "wrong length" else true)
                self.told_all = plan.tells != "never"
            answer.add(piece)
        if plan.end == "too many":
            answer.add(chunk(*[-1] * (part.gconfig.max_new_tokens - count + 1), version=self.version))


@given(budget=st.integers(1, 40), plans=st.lists(PLANS, max_size=25))
def test_an_answer_is_complete_with_correct_versions_after_any_failures(budget: int, plans: list[PartPlan]) -> None:
    answer, world = Answer(a_request(max_new_tokens=budget), AnswerForm(stream_interval=8)), World()
    settled: list[int] = []
    """Versions of earlier parts: nothing may change them."""
    the_rest = PartPlan("chunk", 3, budget, budget, "abort", 0)
    for plan in [*plans, the_rest]:
        if answer.stop_reason is not None:
            break
        part = answer.next_part("server-0")
        assert part.input_ids == [0, 1, 2, *range(len(settled))]
        assert part.num_prior_output_tokens == len(settled)
        assert part.gconfig.max_new_tokens == budget - len(settled) > 0
        failed = False
        try:
            world.play(plan, part, answer)
        except ServerUnavailable:
            failed = True
        answer.end_part(99)
        now = answer.response()
        assert now.output_ids == list(range(len(now.output_ids)))
        assert now.output_logprobs == [-float(token) for token in now.output_ids]
        versions = now.output_versions
        assert len(versions) == len(now.output_ids) <= budget
        assert versions == sorted(versions)
        assert versions[: len(settled)] == settled
        of_part = versions[len(settled) :]
        if plan.tells == "chunk" or (world.told_all and of_part):
            assert of_part == world.true_versions[: len(of_part)]
        if not failed and plan.tells != "never":
            assert of_part == world.true_versions
        if plan.end == "wrong length" and plan.tells == "end" and world.true_versions:
            assert of_part == []
        settled = list(versions)
        world.version = max(world.version - plan.goes_back_by, answer.newest_version or 0)  # the fleet waits for it
    assert answer.stop_reason is not None
    assert answer.response().output_ids == list(range(budget))


SHAPE = ExpertShape(1, 1, 8)


def rows(*numbers: int) -> RoutedExperts:
    return RoutedExperts(SHAPE, bytes(numbers))


def test_routed_experts_are_those_of_the_pass_that_generated_the_next_token() -> None:
    answer = Answer(a_request(max_new_tokens=6), AnswerForm(stream_interval=8, experts=SHAPE))
    part = answer.next_part("server-0")
    assert part.num_known_experts == 0
    answer.add(chunk(5, 6))
    answer.add(chunk(7, finish="abort")._replace(routed_experts=rows(1, 1, 1, 1, 1)))
    assert answer.next_part("server-1").num_known_experts == 5
    answer.add(chunk(8, 9, version=1))  # its server dies: no record
    part = answer.next_part("server-2")
    assert (part.num_known_experts, len(part.input_ids)) == (5, 8)
    answer.add(chunk(4, version=1, finish="length")._replace(routed_experts=rows(2, 2, 2)))
    response = answer.response()
    assert response.routed_experts == rows(1, 1, 1, 1, 1, 2, 2, 2)
    assert len(response.routed_experts) == len(response.input_ids) + len(response.output_ids) - 1


def test_an_answer_whose_last_part_has_no_record_is_unknown_there() -> None:
    answer = Answer(a_request(max_new_tokens=2), AnswerForm(stream_interval=8, experts=SHAPE))
    answer.next_part("server-0")
    answer.add(chunk(5, 6))
    answer.end_part(99)
    assert answer.stop_reason is not None
    assert answer.response().routed_experts == rows(255, 255, 255, 255)


@pytest.mark.parametrize("result", [None, rows(1, 1, 1), RoutedExperts(ExpertShape(1, 1, 9), bytes(4))])
def test_a_finished_part_has_the_experts_of_all_its_tokens(result: RoutedExperts | None) -> None:
    answer = Answer(a_request(max_new_tokens=2), AnswerForm(stream_interval=8, experts=SHAPE))
    answer.next_part("server-0")
    with pytest.raises(ServerUnavailable) as caught:
        answer.add(chunk(5, 6, finish="length")._replace(routed_experts=result))
    assert caught.value.code == "server.unreadable_answer"
    assert answer.stop_reason is None


def test_routed_experts_are_read_from_both_dialects() -> None:
    numbers = struct.pack("<3i", 0, 7, -1)
    meta = {"routed_experts": base64.b64encode(numbers).decode()}
    assert experts_of(meta, SHAPE, item_bytes=4) == rows(0, 7, 255)
    assert experts_of({"routed_experts": base64.b64encode(b"\x02\x03").decode()}, SHAPE, item_bytes=0) == rows(2, 3)
    assert experts_of({}, SHAPE, item_bytes=4) is experts_of(meta, None, item_bytes=4) is None
    for text in (base64.b64encode(struct.pack("<i", 8)).decode(), "===", base64.b64encode(b"123").decode()):
        with pytest.raises(ValueError):  # noqa: PT011 - the client makes it an unreadable answer
            experts_of({"routed_experts": text}, SHAPE, item_bytes=4)
