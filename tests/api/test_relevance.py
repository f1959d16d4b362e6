"""When an option has an effect: conditions, the check of a finished config, and the configs of areal."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

import pytest

from areal.api.config import load_experiment
from areal.api.config.experiment import KINDS
from areal.api.config.load import help_text
from areal.api.config.schema import (
    FieldSpec,
    above,
    choice,
    fields_of,
    find_field,
    given,
    notice_of,
    number,
    option,
    options_without_effect,
    relevance_of,
    satisfies,
    section,
    unless,
    when,
)
from areal.api.errors import ConfigError
from areal.api.registry import entries

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, kw_only=True)
class Clip:
    size: float = number(0.2, relevant=when("../loss", "ppo", "gspo"))
    """Size."""
    upper: float | None = number(None, relevant=above("size", 0) & unless("/mode", "off"))
    """Upper."""


@dataclass(frozen=True, kw_only=True)
class Model:
    loss: str = choice("ppo", "ppo", "gspo", "sft")
    """Loss."""
    clip: Clip = field(default_factory=Clip)
    """Clip."""
    extra: Clip | None = option(None, relevant=given("/path"))
    """Extra."""
    items: list[Clip] = section(list[Clip], relevant=satisfies("/", lambda top: top.mode != "off", "something runs"))
    """Items."""
    lora: int = number(1, relevant=when("missing.option", 3))
    """A config class without the option that a condition names."""


@dataclass(frozen=True, kw_only=True)
class Top:
    mode: str = "on"
    """Mode."""
    path: str = ""
    """Path."""
    model: Model = section(Model, relevant=when("mode", "on", "off") | given("path"))
    """Model."""


def unused(model: Model, **top: str) -> dict[str, str]:
    return {item.path: item.relevant_when for item in options_without_effect(Top(model=model, **top))}


@pytest.mark.parametrize(
    ("model", "top", "expected"),
    [
        (Model(), {}, {}),
        (Model(clip=Clip(size=0.3, upper=1.0)), {}, {}),
        (Model(loss="sft"), {}, {}),  # a default is never listed
        (Model(loss="sft", clip=Clip(size=0.2)), {}, {}),
        (Model(loss="sft", clip=Clip(size=0.3)), {}, {"model.clip.size": "model.loss is ppo or gspo"}),
        (
            Model(clip=Clip(upper=0.3)),
            {"mode": "off"},
            {"model.clip.upper": "model.clip.size is above 0 and mode is not off"},
        ),
        (Model(extra=Clip()), {}, {"model.extra": "path is set"}),
        (Model(extra=Clip()), {"path": "x"}, {}),
        (Model(items=[Clip()]), {"mode": "off"}, {"model.items": "something runs"}),
        (Model(loss="sft", items=[Clip(), Clip(size=1)]), {}, {"model.items[1].size": "model.loss is ppo or gspo"}),
        (
            Model(loss="sft", clip=Clip(size=0.3)),
            {"mode": "x"},
            {"model.loss": "mode is on or off or path is set", "model.clip.size": "mode is on or off or path is set"},
        ),
        (Model(lora=2), {}, {}),
    ],
)
def test_what_is_listed(model, top, expected):
    assert unused(model, **top) == expected


def test_the_notice_has_one_line_for_each_option():
    assert notice_of(Top()) == ""
    model = Model(loss="sft", clip=Clip(size=0.3))
    assert notice_of(Top(model=model)).splitlines()[1:] == [
        "  model.clip.size has an effect only when model.loss is ppo or gspo."
    ]


def test_nested_alternatives_are_put_in_brackets():
    condition = (when("a", None) | when("b", True)) & above("c", 0.5)
    assert condition.words("") == "(a is null or b is true) and c is above 0.5"
    assert condition.sentence("") == "either a is null or b is true, and c is above 0.5"
    assert (above("c", 0.5) | (when("a", 1) & given("b"))).sentence("") == "c is above 0.5, or both a is 1 and b is set"
    assert list(condition.paths("model")) == ["model.a", "model.b", "model.c"]


def test_help_shows_the_condition():
    text = help_text(Top)
    assert "relevant when model.loss is ppo or gspo" in text
    assert "[model] Model. (relevant when mode is on or off or path is set)" in text
    assert "relevant when model.loss is ppo or gspo" in help_text(Top, "model.clip.size")


def conditions(cls: type, prefix: str = "") -> Iterator[tuple[str, FieldSpec, object]]:
    entries = {entry.name: entry for entry in fields(cls)}
    for name, spec in fields_of(cls).items():
        yield f"{prefix}{name}", spec, relevance_of(entries[name])
        below = spec.hint if spec.is_section else spec.item_section
        if below is not None:
            yield from conditions(below, f"{prefix}{name}" + ("." if spec.is_section else "[]."))


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_every_condition_names_an_option_that_exists(cls):
    unknown = {
        path: read
        for path, _, condition in conditions(cls)
        if condition is not None
        for read in condition.paths(path.rpartition(".")[0])
        if find_field(cls, read) is None and not hasattr(cls, read)
    }
    assert not unknown


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_defaults_have_an_effect_or_are_not_listed(cls):
    assert not options_without_effect(cls())


@pytest.fixture
def load(load):
    return partial(load, "gconfig={n_samples: 4, max_new_tokens: 64}")


SWEEP = [
    "actor.eps_clip=0.3",
    "actor.eps_clip_higher=0.4",
    "actor.c_clip=3",
    "actor.importance_sampling_level=sequence",
    "actor.sequence_level.gradient=own",
]


@pytest.mark.parametrize("loss", [name for name in entries("losses") if name != "custom"])
def test_one_file_serves_a_sweep_over_all_losses(load, loss):
    config = load(*SWEEP, f"actor.policy_loss={loss}")
    listed = {item.path for item in options_without_effect(config)}
    reads_clip = loss in ("ppo", "gspo", "cispo", "gmpo", "clip_cov", "dppo")
    assert {"actor.eps_clip", "actor.eps_clip_higher"} & listed == (
        set() if reads_clip else {"actor.eps_clip", "actor.eps_clip_higher"}
    )


def test_intervals_of_recovery_checkpoints_are_listed_when_recovery_is_off(load):
    options = ["recover.freq_steps=5", "recover.freq_epochs=1", "recover.freq_secs=60", "recover.retries=1"]
    assert not options_without_effect(load(*options))
    listed = {item.path for item in options_without_effect(load(*options, "recover.mode=disabled"))}
    assert listed == {"recover.freq_steps", "recover.freq_epochs", "recover.freq_secs"}


@pytest.mark.parametrize(
    ("trainer", "unused"),
    [
        ("fsdp", {"actor.megatron.fp8", "actor.megatron.ddp.bucket_size", "actor.megatron.recompute_num_layers"}),
        (
            "megatron",
            {"actor.fsdp.offload_params", "actor.megatron.ddp.bucket_size", "actor.megatron.recompute_num_layers"},
        ),
    ],
)
def test_options_of_another_train_engine_are_listed(load, trainer, unused):
    options = ["actor.megatron.fp8=e4m3", "actor.megatron.ddp.bucket_size=9", "actor.fsdp.offload_params=true"]
    options.append("actor.megatron.recompute_num_layers=2")  # gradient_checkpointing is off
    config = load(*options, "actor.fsdp.wrap_policy={}", f"allocation_mode=native:d1+{trainer}:d1")
    assert {item.path for item in options_without_effect(config)} == unused


@pytest.mark.parametrize(("optimizer", "is_listed"), [("sgd", True), ("adam", False)])
def test_gathers_of_a_shared_optimizer_state_need_moments(load, optimizer, is_listed):
    ddp = "actor.megatron.ddp={overlap_grad_reduce: true, overlap_param_gather: true}"
    config = load(f"actor.optimizer.type={optimizer}", ddp, "allocation_mode=native:d1+megatron:d1")
    listed = {item.path for item in options_without_effect(config)}
    assert ("actor.megatron.ddp.overlap_param_gather" in listed) == is_listed


def test_strict_config_refuses_what_has_no_effect(load):
    load("strict_config=true", "actor.eps_clip=0.3")
    with pytest.raises(ConfigError) as caught:
        load("strict_config=true", "actor.policy_loss=sapo", "actor.eps_clip=0.3")
    assert caught.value.code == "config.no_effect"
    assert [problem.path for problem in caught.value.problems] == ["actor.eps_clip"]


@pytest.mark.parametrize(
    ("launcher", "unused"),
    [
        ("auto", set()),
        ("slurm", set()),
        ("ssh", {"launcher.trainer_mem_per_gpu", "launcher.slurm.partition"}),
        ("local", {"launcher.trainer_mem_per_gpu", "launcher.slurm.partition", "launcher.slurm.trainer_image"}),
    ],
)
def test_options_of_another_launcher_are_listed(load, launcher, unused):
    options = ["launcher.trainer_mem_per_gpu=1", "launcher.slurm={partition: gpu, trainer_image: a.sif}"]
    assert {item.path for item in options_without_effect(load(*options, f"launcher.type={launcher}"))} == unused


def test_the_number_of_samples_needs_an_interval(load):
    assert not options_without_effect(load("stats_logger.samples=9"))
    unused = options_without_effect(load("stats_logger.samples=9", "stats_logger.samples_freq_steps=null"))
    assert [item.path for item in unused] == ["stats_logger.samples"]


@pytest.mark.parametrize(("drop_last", "unused"), [("true", []), ("false", ["valid_dataset.batch_size"])])
def test_generated_evaluations_have_no_batches_of_rows(load, drop_last, unused):
    config = load(f"valid_dataset={{path: a.jsonl, batch_size: 2, drop_last: {drop_last}}}")
    assert [item.path for item in options_without_effect(config)] == unused


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_option_of_an_example_has_an_effect(path):
    assert options_without_effect(load_experiment(["--config", str(path)])) == []
