"""A prompt that several answers share is computed once, with the outputs and gradients of whole sequences."""

from dataclasses import replace

import pytest
import torch

from areal.algorithm.advantage import RETURNS
from areal.api.batch import CANDIDATE_IDS
from areal.data.pack import rows_to_train_batch
from areal.engine.micro_batch import make_micro_batch, shared_row
from areal.engine.packed_attention import packed_layout

pytestmark = pytest.mark.usefixtures("shares_in_small_rows")

CPU = torch.device("cpu")
# (group, prompt, answer): group 1 has an answer to another prompt of the same length; one answer is alone.
ANSWERS = [
    *((0, [1, 2, 3, 4, 5, 6], length) for length in (2, 5, 2, 1)),
    *((1, [7, 8, 9, 10, 11, 12], length) for length in (2, 3)),
    (1, [7, 8, 9, 10, 11, 13], 3),
    *((2, [14, 15, 16], length) for length in (4, 4, 2)),
    (3, [1, 2, 3, 4], 2),
]


def grouped_batch(untrained: int | None = None):
    """`untrained`: a sequence without trained tokens."""
    generator = torch.Generator().manual_seed(5)
    rows = [prompt + torch.randint(0, 23, (n,), generator=generator).tolist() for _, prompt, n in ANSWERS]
    masks = [[0] * len(prompt) + [int(i != untrained)] * n for i, (_, prompt, n) in enumerate(ANSWERS)]
    batch = rows_to_train_batch(rows, masks)
    weights = torch.randn(2, batch.num_tokens, generator=generator)
    groups = torch.tensor([group for group, _, _ in ANSWERS])
    return replace(batch, group_ids=groups, advantages=weights[0]).with_column(RETURNS, weights[1])


@pytest.mark.parametrize("needs_last", [True, False])
@pytest.mark.parametrize("untrained", [None, 1])
def test_every_token_has_its_place_in_a_shorter_row(untrained, needs_last):
    batch = grouped_batch(untrained)
    _, whole = make_micro_batch(batch, list(range(len(ANSWERS))), CPU)
    micro, inputs = make_micro_batch(batch, list(range(len(ANSWERS))), CPU, shares_prompts=True, needs_last=needs_last)
    ends = micro.batch.cu_seqlens[1:].long() - 1
    moved = [] if needs_last else ends[inputs.rows[ends] == inputs.rows[ends - 1]].tolist()
    places = torch.arange(batch.num_tokens)
    places[moved] -= 1  # the last token of an answer stands where the token before it does
    assert torch.equal(inputs.input_ids[inputs.rows], whole.input_ids[places])
    assert torch.equal(inputs.position_ids[inputs.rows], whole.position_ids[places])
    assert torch.equal(micro.position_ids, whole.position_ids)
    saved = (2 if untrained else 3) * 6 + 6 + 2 * 3
    num_shared = 9 if untrained is None else 8  # answers that share their prompt
    assert len(moved) == (0 if needs_last else num_shared)
    assert inputs.input_ids.numel() == batch.num_tokens - saved - len(moved)
    layout = inputs.layout
    in_runs = sum(count * length for _, count, length in layout.runs)
    in_answers = sum(run.prompts.numel() * run.length for run in layout.answers)
    assert in_runs + in_answers == inputs.input_ids.numel()
    for run in layout.answers:
        assert run.prompts.max() < layout.runs[run.block][1]


def shared_row_of(prompts: list[int], answers: int):
    """The row of two answers of `answers` tokens to each prompt. `prompts`: their lengths."""
    rows = [[*range(length), *[9] * answers] for length in prompts for _ in range(2)]
    masks = [[0] * length + [1] * answers for length in prompts for _ in range(2)]
    groups = torch.arange(len(prompts)).repeat_interleave(2)
    batch = replace(rows_to_train_batch(rows, masks), group_ids=groups)
    return shared_row(batch, packed_layout(batch.cu_seqlens, batch.sequence_lengths), needs_last=True)


@pytest.mark.parametrize(("prompt", "is_shared"), [(2, False), (4, True)])
def test_a_row_that_saves_little_is_left_as_it_is(prompt, is_shared):
    row = shared_row_of([prompt], 8)  # saves 2 of 20 tokens, or 4 of 24
    assert (row is not None) == is_shared


@pytest.mark.parametrize(("saved_per_call", "is_shared"), [(4, True), (5, False)])
def test_a_row_of_many_small_calls_is_left_as_it_is(monkeypatch, saved_per_call, is_shared):
    monkeypatch.setattr("areal.engine.micro_batch.SAVED_PER_CALL", saved_per_call)
    row = shared_row_of([4, 5], 3)  # saves 9 tokens; calls for 2 lengths become 2 of prompts and 2 of answers
    assert (row is not None) == is_shared
    assert shared_row_of([5, 5], 5) is not None  # saves 10 tokens; 1 call becomes 2


@pytest.mark.parametrize(
    ("model", "options"),
    [("qwen2", {}), ("qwen3", {}), ("llama", {"gradient_checkpointing": True}), ("qwen3", {"mb_spec_mbs": 3})],
)
def test_outputs_and_gradients_equal_those_of_whole_sequences(cases, models, monkeypatch, model, options):
    computed: list[int] = []
    original = make_micro_batch

    def counted(*args, **kwargs):
        micro, inputs = original(*args, **kwargs)
        computed.append(inputs.input_ids.numel())
        return micro, inputs

    monkeypatch.setattr("areal.engine.fsdp.make_micro_batch", counted)
    options = dict(options)
    if (count := options.pop("mb_spec_mbs", None)) is not None:
        options["mb_spec"] = cases.MicroBatchSpec(n_mbs=count)
    batch = grouped_batch(untrained=9)
    found, sizes = [], []
    for shared in (False, True):
        engine = cases.make_engine(models / model, outputs=cases.RICH, shared_prompts=shared, **options)
        computed.clear()
        outputs = engine.forward(batch)
        sizes.append(sum(computed))
        batch_with_ids = batch.with_column(CANDIDATE_IDS, outputs.candidate_ids)
        found.append((outputs, cases.gradients(engine, batch_with_ids, loss_fn=cases.rich_loss)))
    assert sizes[1] < sizes[0] == batch.num_tokens
    (plain, expected), (shared_outputs, gradients) = found
    for name in cases.RICH_NAMES:
        torch.testing.assert_close(getattr(shared_outputs, name), getattr(plain, name), rtol=0, atol=3e-6, msg=name)
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"lora": "dropout"}, {"experts": True}])
def test_other_models_compute_whole_sequences(cases, models, options):
    name = "qwen3_moe" if options.pop("experts", False) else "qwen3"
    if options.get("lora"):
        options = {"lora": replace(cases.LORA, dropout=0.1)}
    engine = cases.make_engine(models / name, **options)
    _, inputs = engine._micro_batch(grouped_batch(), list(range(len(ANSWERS))))
    assert inputs.rows is None


def test_a_reward_model_scores_the_last_token_of_answers_with_a_shared_prompt(cases, models):
    batch = grouped_batch()
    plain, shared = (
        cases.make_engine(models / "qwen3", role="reward", shared_prompts=shared, seed=1).forward(batch)
        for shared in (False, True)
    )
    torch.testing.assert_close(shared.scores, plain.scores, rtol=0, atol=3e-6)
