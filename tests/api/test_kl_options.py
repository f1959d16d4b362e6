"""Options of the divergence from the reference: no combination of them is without effect unsaid."""

from pathlib import Path

import pytest

from areal.api.config import GRPOConfig, load_config
from areal.api.errors import ConfigError

MINIMAL = """
experiment_name: sort
trial_name: t0
allocation_mode: native:d1+fsdp:d1
train_dataset: {path: rows.jsonl, batch_size: 8}
actor: {path: /models/tiny, optimizer: {lr: 1e-4}}
"""
REF = "ref={path: /models/tiny}"
ADAPTIVE = "actor.kl_control={type: adaptive, target: 0.1}"


@pytest.fixture
def load(tmp_path: Path):
    def load(*overrides: str) -> GRPOConfig:
        path = tmp_path / "x.yaml"
        path.write_text(MINIMAL, encoding="utf-8")
        return load_config(["--config", str(path), *overrides], GRPOConfig)

    return load


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [REF],
        [REF, "actor.kl_ctl=0"],  # as AReaL's files have it: the reference is not loaded
        [REF, ADAPTIVE, "actor.kl_estimator=abs"],
        [REF, "actor.kl_ctl=0", "actor.kl_loss_coef=0.01", "actor.kl_loss_estimator=k3+"],
        [REF, "actor.kl_loss_coef=0.01", "actor.kl_loss_correction=old"],
        [REF, "actor.kl_estimator=full", "actor.kl_top_k=0"],
        [REF, "actor.kl_loss_coef=0.01", "actor.kl_loss_estimator=full", "actor.kl_top_k=64"],
        [REF, "ref_reset_steps=10", "ref_reset_optimizer=true"],
        [REF, "actor.kl_ctl=0", "actor.kl_loss_coef=0.01", "ref_reset_steps=10"],
    ],
)
def test_what_goes_together(load, overrides):
    load(*overrides)


@pytest.mark.parametrize(
    ("overrides", "path", "expected"),
    [
        (["actor.kl_control.target=1"], "actor.kl_control.target", "kl_control.type=adaptive"),
        (["actor.kl_control.horizon=1"], "actor.kl_control.horizon", "kl_control.type=adaptive"),
        (["actor.kl_control.measure=sequence-sum"], "actor.kl_control.measure", "kl_control.type=adaptive"),
        (["actor.kl_control.type=adaptive", REF], "actor.kl_control.target", "is null"),
        ([ADAPTIVE, REF, "actor.kl_ctl=0"], "actor.kl_ctl", "start above 0"),
        ([ADAPTIVE], "actor.kl_control.type", "needs a reference"),
        (["actor.kl_loss_coef=1"], "actor.kl_loss_coef", "needs a reference"),
        (["actor.kl_estimator=full", "actor.kl_top_k=4"], "actor.kl_top_k", "needs a reference"),
        ([REF, "actor.kl_estimator=full"], "actor.kl_top_k", "is null, but kl_estimator=full needs it"),
        (
            [REF, "actor.kl_loss_coef=1", "actor.kl_loss_estimator=full"],
            "actor.kl_top_k",
            "is null, but kl_loss_estimator=full needs it",
        ),
        ([REF, "actor.kl_top_k=4"], "actor.kl_top_k", "only with kl_estimator=full"),
        ([REF, "actor.kl_ctl=0", "actor.kl_estimator=full"], "actor.kl_estimator", "no effect with kl_ctl=0"),
        ([REF, "actor.kl_loss_estimator=k1"], "actor.kl_loss_estimator", "no effect with kl_loss_coef=0"),
        ([REF, "actor.kl_loss_correction=old"], "actor.kl_loss_correction", "no effect with kl_loss_coef=0"),
        (
            [REF, "actor.kl_loss_coef=1", "actor.kl_loss_estimator=k3+", "actor.kl_loss_correction=old"],
            "actor.kl_loss_correction",
            "use k3 with it",
        ),
        (
            [REF, "actor.kl_loss_coef=1", "actor.kl_loss_estimator=full", "actor.kl_loss_correction=rollout",
             "actor.kl_top_k=0"],
            "actor.kl_loss_correction",
            "nothing to correct",
        ),
        ([REF, "actor.kl_estimator=k3+"], "actor.kl_estimator", "use one of k1, k2, k3, abs, full"),
        (["ref_reset_steps=2"], "ref_reset_steps", "no reference to reset"),
        ([REF, "actor.kl_ctl=0", "ref_reset_steps=2"], "ref_reset_steps", "no reference to reset"),
        ([REF, "ref_reset_optimizer=true"], "ref_reset_optimizer", "only with ref_reset_steps"),
        ([REF, "ref_reset_steps=0"], "ref_reset_steps", "at least 1"),
    ],
)  # fmt: skip
def test_what_has_no_effect_or_cannot_work_is_refused_by_name(load, overrides, path, expected):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    lines = [line for line in str(caught.value).splitlines() if f"{path}:" in line]
    assert lines, caught.value
    assert expected in lines[0]
