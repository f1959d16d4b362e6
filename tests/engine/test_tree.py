"""Tokens that rows share are computed once, with the outputs and gradients of separate rows."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import create_mask, flex_attention

from areal.algorithm.advantage import RETURNS
from areal.api.batch import CANDIDATE_IDS
from areal.api.columns import ROUTED_EXPERTS
from areal.api.config import MicroBatchSpec
from areal.api.data import TEMPERATURES
from areal.api.images import ImageRef, expanded
from areal.data import prefix_tree as trees
from areal.data.balance import balanced_parts
from areal.data.image_files import ImageFiles, encode_image
from areal.data.pack import rows_to_train_batch, take
from areal.engine import micro_batch
from areal.engine import tree_attention as attention
from areal.engine.micro_batch import make_micro_batch, rows_of, rows_that_share
from areal.models import tree_states
from areal.models.vision_layout import read_vision_layout
from tests.data.test_prefix_tree import rows_of_trees
from tests.engine import engine_cases, vision_cases
from tests.engine.test_every_family import small_model
from tests.engine.trainer_updates import UPDATES
from tests.expect import raises_code
from tests.gpu import bodies
from tests.rank_processes import run_ranks

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
SIZES = {"rtol": 0, "atol": 1e-5}


def batch_of(rows, masks=None, groups=None, seed=5):
    batch = rows_to_train_batch(rows, masks or [[0, *[1] * (len(row) - 1)] for row in rows])
    weights = torch.randn(2, batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    groups = batch.group_ids if groups is None else torch.tensor(groups)
    return replace(batch, group_ids=groups, advantages=weights[0]).with_column(RETURNS, weights[1])


def grouped_batch(untrained: int | None = None):
    """`untrained`: a sequence without trained tokens."""
    generator = torch.Generator().manual_seed(5)
    rows = [prompt + torch.randint(0, 23, (n,), generator=generator).tolist() for _, prompt, n in ANSWERS]
    masks = [[0] * len(prompt) + [int(i != untrained)] * n for i, (_, prompt, n) in enumerate(ANSWERS)]
    return batch_of(rows, masks, [group for group, _, _ in ANSWERS])


def distinct_beginnings(rows) -> int:
    return len({tuple(row[: end + 1]) for row in rows for end in range(len(row))})


@cache
def engines(path, **options):
    """One that computes rows, one that computes trees."""
    return [
        engine_cases.make_engine(path, outputs=engine_cases.RICH, shared_prefixes=kind, **options)
        for kind in ("off", "tree")
    ]


@cache
def exact_engine(path):
    """One that computes rows in float64."""
    engine = engine_cases.make_engine(path, outputs=engine_cases.RICH, shared_prefixes="off")
    engine._model.double()
    return engine


def flat_gradient(engine, batch, loss=engine_cases.rich_loss) -> torch.Tensor:
    engine._model.zero_grad()
    engine.forward_backward(batch, loss, denominator=1.0)
    result = [weight.grad for weight in engine._model.parameters() if weight.grad is not None]
    return torch.cat([(grad.full_tensor() if isinstance(grad, DTensor) else grad).flatten() for grad in result])


def assert_near(result: torch.Tensor, expected: torch.Tensor, relative: float) -> None:
    assert float((result - expected).norm()) <= relative * float(expected.norm())


@settings(max_examples=500, derandomize=True, phases=[Phase.generate])  # rounding is not the same for each example
@given(rows_of_trees())
def test_trees_give_the_outputs_and_gradients_of_separate_rows(models, rows):
    assert_same(exact_engine(models / "qwen3"), engines(models / "qwen3")[1], batch_of(rows), gradients=1e-6)


def assert_same(plain, tree, batch, *, gradients: float) -> None:
    """Relative differences in float32. Rows of gated delta nets, which compute in chunks, are themselves up to 1.3e-6
    from the gradients in float64."""
    expected, actual = plain.forward(batch), tree.forward(batch)
    assert_near(actual.logprobs, expected.logprobs, 1e-6)
    assert_near(actual.entropy, expected.entropy, 1e-6)
    # of one sign: where the gradients of rows cancel out, what remains is the rounding of both sides
    batch = replace(batch, advantages=batch.advantages.abs()).with_column(CANDIDATE_IDS, expected.candidate_ids)
    first, second = (flat_gradient(engine, batch, engine_cases.policy_loss) for engine in (plain, tree))
    assert_near(second, first, gradients)


STATES = ("qwen3_5_text", "nemotron_h", "lfm2")
"""A gated delta net, Mamba 2 and short convolutions."""
OTHER_STATES = (
    "bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2_moe", "lfm3", "mamba2",
    "olmo_hybrid", "qwen3_5_moe_text", "qwen3_next", "zamba2", "zaya",
)  # fmt: skip


@pytest.fixture(scope="module")
def models_with_states(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.mark.parametrize("family", [*STATES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHER_STATES)])
def test_a_branch_continues_the_states_of_its_parent(models_with_states, family):
    small_model(family).save_pretrained(models_with_states / family)
    plain, tree = engines(models_with_states / family)

    @settings(max_examples=25 if family in STATES else 5, derandomize=True, phases=[Phase.generate], deadline=None)
    @given(rows_of_trees())
    def check(rows):
        assert_same(plain, tree, batch_of(rows), gradients=3e-6)

    check()


def test_states_are_passed_on_over_chunks_in_few_calls(models_with_states, monkeypatch):
    """Rows of more than a chunk of 64 tokens, in float32, with checkpoints, and with adapters."""
    monkeypatch.setattr(tree_states, "MIN_PART", 16)
    draws = torch.Generator().manual_seed(0)
    prompt, turn, *ends = (torch.randint(23, (n,), generator=draws).tolist() for n in (90, 70, 5, 5, 40, 3, 64))
    batch = batch_of([prompt + end for end in ends[:3]] + [prompt + turn + end for end in (*ends[2:], turn[:9])])
    small_model("qwen3_5_text").save_pretrained(models_with_states / "long")
    shapes: list[list[tuple[int, ...]]] = []

    def counted(spans, device):
        plan = tree_states.state_calls(spans, device)
        shapes.append([tuple(call.tokens.shape) for call in plan.calls])
        return plan

    monkeypatch.setattr("areal.models.recurrent_layers.state_calls", counted)
    for options in ({}, {"gradient_checkpointing": True}, {"lora": replace(engine_cases.LORA, rank=2)}):
        plain, tree = (
            engine_cases.make_engine(
                models_with_states / "long", outputs=engine_cases.RICH, shared_prefixes=kind, **options
            )
            for kind in ("off", "tree")
        )
        assert_same(plain, tree, batch, gradients=3e-6)
    assert shapes[-1] == [(1, 90), (1, 70), (3, 4), (1, 8), (3, 63)]  # ends without their last token, padded


def test_layers_that_cannot_continue_a_state_are_refused(models_with_states):
    small_model("jamba").save_pretrained(models_with_states / "jamba")
    with raises_code("model.unsupported", "JambaMambaMixer"):
        engine_cases.make_engine(models_with_states / "jamba", shared_prefixes="tree")


def test_a_device_without_memory_is_no_layer_that_cannot_continue_a_state():
    class WithoutMemory(torch.nn.Module):
        def __init__(self, config, layer_idx):
            super().__init__()
            if layer_idx == 0:
                raise torch.OutOfMemoryError

        def forward(self, hidden_states, cache_params=None): ...

    with pytest.raises(torch.OutOfMemoryError):
        tree_states.continues_state(WithoutMemory(None, 1), None, torch.device("cpu"), torch.float32)


ROWS_WITH_IMAGES = [[0, 1, 2, 3], [0, 1, 4], [0, 1], [5], [5], [0, 1, 2, 3], [6, 7]]
"""Parts of each row. Parts 0, 2 and 5 have the images 0, 1 and 2; those of 0 and 5 are equal but for their images."""


def batch_with_images(folder):
    layout, files = read_vision_layout(str(folder / "model")), ImageFiles(folder / "images")
    mark = vision_cases.written_ids(layout, vision_cases.tokenizer_of(layout.family))
    images = []
    for seed in range(3):
        png, grid = encode_image(vision_cases.picture(60, 50, seed), layout)
        images.append(ImageRef(files.put(png), grid))
    of_part = {0: images[0], 2: images[1], 5: images[2]}
    texts = [torch.randint(8, 18, (6,), generator=torch.Generator().manual_seed(part)).tolist() for part in range(8)]
    texts[5] = texts[0]
    ids = [
        [token for part in row for token in (mark if part in of_part else []) + texts[part]] for row in ROWS_WITH_IMAGES
    ]
    ours = [[of_part[part] for part in row if part in of_part] for row in ROWS_WITH_IMAGES]
    rows = [expanded(row, item, layout) for row, item in zip(ids, ours, strict=True)]
    batch = rows_to_train_batch(rows, [[0] * (len(row) - 4) + [1] * 4 for row in rows], ours)
    weights = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0))
    return layout, replace(batch, advantages=weights)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "internvl", "smolvlm"])
@pytest.mark.parametrize("options", [{}, {"mb_spec": MicroBatchSpec(max_tokens_per_mb=200, max_patches_per_mb=200)}])
def test_rows_share_images_with_the_tokens_before_them(tmp_path, family, options):
    vision_cases.write_case(tmp_path, family)
    layout, batch = batch_with_images(tmp_path)
    plain, tree = (vision_cases.make_engine(tmp_path, shared_prefixes=kind, **options) for kind in ("off", "tree"))
    assert_near(tree.forward(batch).logprobs, plain.forward(batch).logprobs, 1e-6)
    first, second = (engine_cases.gradients(engine, batch) for engine in (plain, tree))
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, **SIZES, msg=name)
    assert any(value.abs().max() > 1e-3 for name, value in first.items() if "vis" in name)
    _, inputs = make_micro_batch(batch, [0, 1, 3], CPU, rows=rows_of(batch, tree._vision))
    image, text = layout.tokens_of(batch.images[0]), 6
    before = len(batch.input_ids[: batch.cu_seqlens[1]]) - 2 * image - 4 * text  # tokens around two images
    around = before // 2
    first = int((batch.input_ids == layout.image_token_id).int().argmax())  # those before the first image
    assert inputs.input_ids.numel() == (2 * around + 2 * image + 4 * text) + text + (around - first + image + text)


def test_images_whose_tokens_see_later_ones_are_refused(tmp_path):
    vision_cases.write_case(tmp_path, "gemma3")
    with raises_code("model.unsupported", "shared_prefixes=tree"):
        vision_cases.make_engine(tmp_path, shared_prefixes="tree")


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("qwen2", {}),
        ("llama", {"gradient_checkpointing": True}),
        ("llama", {"gradient_checkpointing": True, "checkpointing": "selective"}),
        ("qwen3", {"mb_spec": MicroBatchSpec(n_mbs=3)}),
        ("qwen3", {"mb_spec": MicroBatchSpec(granularity=11)}),
        ("qwen3", {"lora": engine_cases.LORA}),
        ("qwen3_moe", {}),
        ("mixtral", {}),
        ("deepseek_v3", {}),  # values are narrower than keys
    ],
)
def test_models_and_options_compute_fewer_tokens_to_the_same_end(models, monkeypatch, model, options):
    computed: list[int] = []

    def counted(*args, **kwargs):
        micro, inputs = make_micro_batch(*args, **kwargs)
        computed.append(inputs.input_ids.numel())
        return micro, inputs

    monkeypatch.setattr("areal.engine.fsdp.make_micro_batch", counted)
    batch, actual, sizes = grouped_batch(untrained=9), [], []
    for kind in ("off", "tree"):
        engine = engine_cases.make_engine(models / model, outputs=engine_cases.RICH, shared_prefixes=kind, **options)
        computed.clear()
        outputs = engine.forward(batch)
        sizes.append(sum(computed))
        batch_with_ids = batch.with_column(CANDIDATE_IDS, outputs.candidate_ids)
        actual.append((outputs, engine_cases.gradients(engine, batch_with_ids, loss_fn=engine_cases.rich_loss)))
    assert sizes[1] < sizes[0] == batch.num_tokens
    (plain, expected), (shared_outputs, gradients) = actual
    for name in engine_cases.RICH_NAMES:
        torch.testing.assert_close(getattr(shared_outputs, name), getattr(plain, name), rtol=0, atol=3e-6, msg=name)
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, **SIZES, msg=name)


@pytest.mark.parametrize("name", list(UPDATES))
def test_updates_of_the_trainer_are_those_of_separate_rows(models, name):
    role = {"ppo": "critic"}.get(name, "actor")
    result = []
    for kind in ("off", "tree"):
        engine = engine_cases.make_engine(models / "qwen3", role=role, shared_prefixes=kind, seed=1)
        metrics = UPDATES[name](engine, grouped_batch())
        result.append(engine_cases.weights_of(engine))
    assert metrics["tree_ratio" if "tree_ratio" in metrics else f"{role}/tree_ratio"].value > 1.2
    for key, value in result[0].items():
        torch.testing.assert_close(result[1][key], value, **SIZES, msg=key)


def test_bfloat16_differs_by_its_rounding(models):
    batch = grouped_batch()
    exact = flat_gradient(engines(models / "qwen3")[0], with_ids(models, batch))
    rows, tree = (
        flat_gradient(engine, with_ids(models, batch)) for engine in engines(models / "qwen3", dtype="bfloat16")
    )
    error, usual = ((item.float() - exact).norm() / exact.norm() for item in (tree, rows))
    assert error < 1.5 * usual < 0.05


def with_ids(models, batch):
    return batch.with_column(CANDIDATE_IDS, engines(models / "qwen3")[0].forward(batch).candidate_ids)


def test_a_reward_model_scores_the_last_token_of_rows_with_a_shared_beginning(models):
    batch = grouped_batch()
    plain, shared = (
        engine_cases.make_engine(models / "qwen3", role="reward", shared_prefixes=kind, seed=1).forward(batch)
        for kind in ("off", "tree")
    )
    torch.testing.assert_close(shared.scores, plain.scores, rtol=0, atol=3e-6)


def test_the_load_of_experts_counts_a_token_once_for_each_row(models):
    batch, result = grouped_batch(), []
    for kind in ("off", "tree"):
        engine = engine_cases.make_engine(models / "qwen3_moe", shared_prefixes=kind, router_aux_loss_coef=0.5)
        metrics = engine_cases.train(engine, batch)
        result.append((metrics, engine_cases.weights_of(engine)))
    for name in ("router_load_max", "router_entropy", "router_balance_loss"):
        assert result[1][0][name].value == pytest.approx(result[0][0][name].value, rel=1e-5)
    for name, value in result[0][1].items():
        torch.testing.assert_close(result[1][1][name], value, **SIZES, msg=name)


def test_tokens_with_other_recorded_experts_are_others(models):
    batch = batch_of([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 7, 8]])
    experts = torch.zeros(batch.num_tokens, 2, 2, dtype=torch.uint8)
    experts[:, :, 1] = 1
    experts[6:10, 0, 1] = 2  # those of row 1, from its second token on
    batch = batch.with_column(ROUTED_EXPERTS, experts)
    _, inputs = make_micro_batch(batch, [0, 1, 2], CPU, rows=rows_of(batch))
    assert inputs.input_ids.numel() == 5 + 4 + 2
    result = []
    for kind in ("off", "tree"):
        engine = engine_cases.make_engine(models / "qwen3_moe", shared_prefixes=kind, router_replay=True)
        result.append(engine_cases.gradients(engine, batch))
    for name, value in result[0].items():
        torch.testing.assert_close(result[1][name], value, **SIZES, msg=name)


def test_a_token_at_another_temperature_is_another_output():
    batch = batch_of([[1, 2, 3], [1, 2, 3]])
    temperatures = torch.full((6,), float("nan"))
    equal = batch.with_column(TEMPERATURES, temperatures.clone())
    _, same = make_micro_batch(equal, [0, 1], CPU, rows=rows_of(equal))
    assert same.input_ids.numel() == 3
    temperatures[4] = 0.5
    different = batch.with_column(TEMPERATURES, temperatures)
    _, other = make_micro_batch(different, [0, 1], CPU, rows=rows_of(different))
    assert other.input_ids.numel() == 4
    assert other.temperatures.isnan().sum() == other.temperatures.numel() - 1


@pytest.mark.parametrize("keeps_last", [True, False])
def test_every_token_has_its_output(keeps_last):
    batch = grouped_batch()
    chosen = list(range(len(ANSWERS)))
    _, whole = make_micro_batch(batch, chosen, CPU)
    micro, inputs = make_micro_batch(batch, chosen, CPU, rows=rows_of(batch), keeps_last=keeps_last)
    tree = inputs.tree
    labelled = whole.has_label
    for name in ("labels", "has_label"):
        assert torch.equal(getattr(inputs, name)[tree.rows][labelled], getattr(whole, name)[labelled])
    assert not inputs.has_label[tree.rows][~labelled].any()
    needed = labelled | keeps_last
    assert torch.equal(inputs.input_ids[tree.heads[tree.rows]][needed], whole.input_ids[needed])
    assert torch.equal(inputs.position_ids[tree.heads[tree.rows]][needed], whole.position_ids[needed])
    assert torch.equal(micro.position_ids, whole.position_ids)
    rows = [row.tolist() for row in micro.batch.input_ids.split(micro.batch.sequence_lengths)]
    assert inputs.input_ids.numel() == distinct_beginnings(rows if keeps_last else [row[:-1] for row in rows])
    assert int(tree.counts.sum()) == batch.num_tokens or not keeps_last


def test_the_passes_of_a_step_over_equal_rows_share_their_trees(models, monkeypatch):
    made = []
    monkeypatch.setattr(micro_batch, "prefix_tree", lambda *args: made.append(1) or trees.prefix_tree(*args))
    batch = batch_of([[*range(4), *[4 + row] * (1 + row)] for row in range(18)])
    first, second = take(batch, list(range(6))), take(batch, list(range(6, 18)))
    engine = engine_cases.make_engine(models / "qwen3", mb_spec=MicroBatchSpec(n_mbs=6))

    def trees_of(pass_over, rows):
        before = len(made)
        pass_over(rows)
        return len(made) - before

    def update(rows):
        engine_cases.gradients(engine, rows)

    assert [trees_of(engine.forward, second), trees_of(update, first)] == [6, 6]
    assert trees_of(update, second.with_column(RETURNS, torch.zeros(second.num_tokens))) == 0
    assert len(engine._trees) == 12
    for _ in range(3):
        update(first)
    assert len(engine._trees) == 6
    assert trees_of(update, second) == 6


def test_micro_batches_are_filled_by_tokens_of_the_tree(models):
    prompt, spec = list(range(10)), MicroBatchSpec(max_tokens_per_mb=30)
    batch = batch_of([[*prompt, 11 + row % 4, row] for row in range(8)])
    tree = engine_cases.make_engine(models / "qwen3", shared_prefixes="tree", mb_spec=spec)
    assert [len(part) for part in tree._plan(batch)[0]] == [8]
    rows = engine_cases.make_engine(models / "qwen3", shared_prefixes="off", mb_spec=spec)
    assert len(rows._plan(batch)[0]) == 4


@pytest.mark.parametrize(
    ("rows", "is_shared"),
    [
        ([[*range(20)], [*range(20, 40)]], False),
        ([[*range(5), *[21] * 15], [*range(5), *[22] * 15]], False),  # below 15%
        ([[*range(9), *[21] * 11], [*range(9), *[22] * 11]], True),
    ],
)
def test_rows_that_share_little_are_computed_as_they_are(rows, is_shared):
    assert (rows_that_share(batch_of(rows)) is not None) == is_shared


def test_each_shared_length_must_save_tokens(monkeypatch):
    batch = batch_of([[*range(9), *[21] * 11], [*range(9), *[22] * 11]])
    monkeypatch.setattr("areal.engine.micro_batch.SAVED_PER_CALL", 9)
    assert rows_that_share(batch) is not None
    monkeypatch.setattr("areal.engine.micro_batch.SAVED_PER_CALL", 10)
    assert rows_that_share(batch) is None


def test_what_cannot_be_a_tree_is_refused_or_left(models):
    dropout = {"lora": replace(engine_cases.LORA, dropout=0.1)}
    with raises_code("model.unsupported", "shared_prefixes=tree"):
        engine_cases.make_engine(models / "qwen3", shared_prefixes="tree", **dropout)
    assert engine_cases.make_engine(models / "qwen3", **dropout)._plan(grouped_batch())[1] is None
    assert engine_cases.make_engine(models / "qwen3")._plan(grouped_batch())[1] is not None


def on_two_ranks(mesh, folder) -> dict[str, float]:
    """The trees of `LONG_ROWS` on two ranks that share no row."""
    batch = batch_of(LONG_ROWS)
    ours = take(batch, balanced_parts(batch.sequence_lengths, 2)[mesh.rank])
    options = {"mb_spec": MicroBatchSpec(max_tokens_per_mb=40), "shared_prefixes": "tree"}
    (path,) = (folder / "models").iterdir()
    engine = engine_cases.make_engine(path, mesh, **options)
    logprobs = engine.forward(ours).logprobs
    metrics = engine_cases.train(engine, ours)
    save_file(engine_cases.weights_of(engine) | {"logprobs": logprobs}, folder / f"tree-{mesh.rank}")
    return {"tree_ratio": metrics["tree_ratio"].value, "as_tree": float(engine._plan(ours)[1] is not None)}


LONG_ROWS = [[*range(14), *[fork] * 3, *range(5), row] for fork in (14, 15) for row in range(16, 22)]


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_two_ranks_learn_what_one_learns_from_separate_rows(tmp_path, family):
    path = tmp_path / "models" / family
    small_model(family).save_pretrained(path)
    run_ranks(on_two_ranks, tmp_path)
    batch = batch_of(LONG_ROWS)
    engine = engine_cases.make_engine(path, shared_prefixes="off")
    logprobs = engine.forward(batch).logprobs.split(batch.sequence_lengths)
    engine_cases.train(engine, batch)
    for rank, part in enumerate(balanced_parts(batch.sequence_lengths, 2)):
        facts = json.loads((tmp_path / f"facts-{rank}.json").read_text())
        assert facts["as_tree"] == 1.0
        assert facts["tree_ratio"] > 1.5
        result = load_file(tmp_path / f"tree-{rank}")
        assert_near(result.pop("logprobs"), torch.cat([logprobs[row] for row in part]), 1e-6)
        for name, value in engine_cases.weights_of(engine).items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=1e-6, msg=name)


def every_tree_on_two_ranks(mesh, folder) -> dict[str, float]:
    """The largest relative differences of trees on two ranks from separate rows on one."""
    logprobs = gradients = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batch, "SAVED_PER_CALL", 0)
        patch.setattr(trees, "MIN_SHARED", 1)
        plain = engine_cases.make_engine(folder / "models" / "qwen3", shared_prefixes="off")
        tree = engine_cases.make_engine(folder / "models" / "qwen3", mesh, shared_prefixes="tree")
        for rows in json.loads((folder / "rows.json").read_text()):
            batch = batch_of(rows)
            batch = replace(batch, advantages=batch.advantages.abs())  # as on one rank
            part = balanced_parts(batch.sequence_lengths, 2)[mesh.rank]
            ours = take(batch, part)
            result, whole = tree.forward(ours).logprobs, plain.forward(batch).logprobs
            if part:
                whole = whole.split(batch.sequence_lengths)
                logprobs = max(logprobs, difference(result, torch.cat([whole[row] for row in part])))
            first = flat_gradient(plain, batch, engine_cases.policy_loss)
            gradients = max(gradients, difference(flat_gradient(tree, ours, engine_cases.policy_loss), first))
    return {"logprobs": logprobs, "gradients": gradients}


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.slow
def test_trees_on_two_ranks_give_the_outputs_and_gradients_of_separate_rows(tmp_path):
    engine_cases.write_models(tmp_path / "models")
    examples = []

    @settings(max_examples=500, derandomize=True, database=None, phases=[Phase.generate])
    @given(rows_of_trees())
    def collect(rows):
        examples.append(rows)

    collect()
    assert (len(examples), min(map(len, examples))) == (500, 1)
    (tmp_path / "rows.json").write_text(json.dumps(examples))
    for facts in run_ranks(every_tree_on_two_ranks, tmp_path):
        assert max(facts.values()) < 1e-6


# --- attention -------------------------------------------------------------------------------------------------------


def within(seen: torch.Tensor, layout, window: int | None) -> torch.Tensor:
    places = layout.positions
    return seen if window is None else seen & (places[:, None] - places < window)


@settings(max_examples=100, derandomize=True, phases=[Phase.generate])
@given(rows_of_trees(), st.sampled_from([None, 3]), st.booleans())
def test_attention_is_that_of_a_mask(rows, window, is_by_branch):
    layout, seen = bodies.layout_of_tree(rows)
    mask = within(seen, layout, window)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, len(seen), 8, generator=generator, dtype=torch.float32) for heads in (4, 2, 2)]
    upstream = torch.randn(1, len(seen), 4, 8, generator=generator)
    result = []
    for as_tree in (True, False):
        q, k, v = leaves = [each.clone().requires_grad_() for each in states]
        if as_tree:
            by = F.scaled_dot_product_attention if is_by_branch else None
            out = attention.tree_attention(q, k, v, layout, scale=0.4, window=window, softcap=None, attend=by)
        else:
            k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.4).transpose(1, 2)
        out.backward(upstream)
        result.append([out, *(each.grad for each in leaves)])
    for ours, exact in zip(*result, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (None, 3.0), (7, None), (200, 3.0)])
def test_the_attention_of_cuda_is_that_of_a_mask(monkeypatch, window, softcap):
    """Uncompiled, which the CPU computes without gradients; the tree has more than a block of tokens."""
    monkeypatch.setattr(attention, "_compiled", lambda: flex_attention)
    assert bodies.tree_attention_error(CPU, torch.float32, window=window, softcap=softcap, size=16) < 1e-5


@settings(max_examples=100, deadline=None)
@given(rows_of_trees(), st.sampled_from([None, 1, 5]))
def test_the_mask_in_blocks_is_that_of_the_rows(rows, window):
    layout, seen = bodies.layout_of_tree(rows)
    count, size = len(seen), 4
    padded = -(-count // size) * size
    ends = torch.cat([layout.ends, torch.arange(count, padded) + 1])
    positions = torch.cat([layout.positions, torch.zeros(padded - count, dtype=torch.int64)])
    by_token = create_mask(attention.sees(ends, positions, window), None, None, padded, padded, device="cpu")[0, 0]
    assert torch.equal(by_token[:count, :count], within(seen, layout, window))
    assert not by_token[:count, count:].any()
    blocks = by_token.unfold(0, size, size).unfold(1, size, size).flatten(2)
    some, whole = attention.seen_blocks(ends, positions, window, size)
    assert bool((some | ~blocks.any(2)).all())
    assert bool((~whole | blocks.all(2)).all())
    assert not bool((whole & ~some).any())


@pytest.mark.parametrize("num_tokens", [1, 128, 129, 5000, 16385])
def test_few_sizes_are_compiled(num_tokens):
    size = attention.bucket(num_tokens)
    assert num_tokens <= size <= max(1.25 * num_tokens, num_tokens + attention.BLOCK)
    assert size % attention.BLOCK == 0
    assert len({attention.bucket(n) for n in range(4096, 8192)}) <= 9
