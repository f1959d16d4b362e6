"""GPG, the plain policy gradient."""

import pytest
import torch


def test_it_conforms(kit):
    kit.conforms(lambda rows, t: -rows.advantages[t] * rows.theta[t], policy_loss="gpg")


def test_by_hand(kit):
    tokens = kit.make_tokens(torch.tensor([-2.0, -0.5], requires_grad=True), advantages=[3.0, -1.0])
    assert kit.loss_of(tokens, policy_loss="gpg").losses.tolist() == [6.0, -0.5]
    assert kit.gradient_of(tokens, torch.ones(2), policy_loss="gpg").tolist() == [-3.0, 1.0]


def test_the_old_policy_does_not_matter(kit):
    tokens = kit.random_tokens(1)
    moved = kit.make_tokens(
        tokens.logprobs, tokens.old_logprobs - 1, tokens.advantages, tokens.mask, tokens.sequence_index
    )
    assert torch.equal(kit.loss_of(tokens, policy_loss="gpg").losses, kit.loss_of(moved, policy_loss="gpg").losses)
    result = kit.loss_of(moved, policy_loss="gpg")
    expected = (tokens.logprobs - tokens.old_logprobs + 1).exp()[tokens.mask]
    assert result.stats["importance_weight"].values[tokens.mask].tolist() == pytest.approx(expected.tolist())
