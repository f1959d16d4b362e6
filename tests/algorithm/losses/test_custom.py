"""A user's own policy loss."""

import pytest
import torch

from areal.algorithm.aggregate import to_metrics
from areal.api.config import PPOActorConfig
from areal.api.config.validate import conflicts
from tests.expect import raises_code
from tests.test_docs import write_files

TEXT = """
import torch

from areal.algorithm.aggregate import TokenStat
from areal.algorithm.policy_loss import PolicyLoss
from areal.algorithm.policy_loss import policy_ratio


def squared(tokens, options):
    ratio = policy_ratio(tokens, options)
    losses = torch.where(tokens.mask, options.policy_loss.args["scale"] * ratio.advantages * ratio.log.square(), 0.0)
    return PolicyLoss(losses=losses, stats={"square": TokenStat(losses, tokens.mask)})


def number(tokens, options):
    return 1.0


def too_short(tokens, options):
    return PolicyLoss(losses=torch.zeros(1), stats={})


def tensor_stat(tokens, options):
    losses = tokens.logprobs * 0
    return PolicyLoss(losses=losses, stats={"square": losses.mean()})


def short_stat(tokens, options):
    return PolicyLoss(losses=tokens.logprobs * 0, stats={"square": TokenStat(torch.zeros(1), tokens.mask)})


def no_stats(tokens, options):
    return PolicyLoss(losses=tokens.logprobs * 0, stats=None)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_loss.py"
    path.write_text(TEXT)
    return path


def options(kit, file, name):
    return {"policy_loss": kit.section("custom", path=f"{file}:{name}", args={"scale": 3.0})}


def test_it_conforms(kit, file):
    kit.conforms(
        lambda rows, t: 3 * rows.advantages[t] * (rows.theta[t] - rows.old[t]) ** 2, **options(kit, file, "squared")
    )


def test_it_may_take_the_ratio_of_the_sequence(kit, file):
    tokens = kit.make_tokens([0.2, 0.4])
    result = kit.loss_of(tokens, **options(kit, file, "squared"), importance_sampling_level="sequence")
    assert result.losses.tolist() == pytest.approx([0.27, 0.27])
    assert {"square", "approx_kl", "importance_weight"} <= set(result.stats)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("number", "float"),
        ("too_short", "(1,)"),
        ("tensor_stat", "a Tensor as stats['square']"),
        ("short_stat", "stats['square']"),
        ("no_stats", "NoneType"),
    ],
)
def test_what_is_no_loss_is_refused(kit, file, name, words):
    with raises_code("loss.custom_result", words):
        kit.loss_of(kit.make_tokens(torch.zeros(2)), **options(kit, file, name))


def test_the_loss_of_the_page_on_workflows_has_a_metric(kit, tmp_path):
    write_files("docs/workflows.md", tmp_path)
    result = kit.loss_of(kit.make_tokens([0.2, 0.4]), **options(kit, tmp_path / "my/loss.py", "loss"))
    moved = to_metrics(result.stats)["moved"]
    assert moved.total / moved.count == pytest.approx(0.3)


def test_what_is_not_there_is_found_before_anything_starts(kit, file):
    def problems(path):
        config = PPOActorConfig(path="x", policy_loss=kit.section("custom", path=path))
        return {path: text for path, text, *_ in conflicts(config)}

    assert not problems(f"{file}:squared")
    assert "is required" in problems("")["policy_loss.path"]
    assert "squared" in problems(f"{file}:sqared")["policy_loss.path"]
    assert not problems("areal.algorithm.losses.policy_gradient:gpg_loss")
    assert "defines no lozz" in problems("areal.algorithm.losses.policy_gradient:lozz")["policy_loss.path"]
    assert "no module" in problems("no_such_module:loss")["policy_loss.path"]
