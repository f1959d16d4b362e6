"""Keys of AReaL files: the names of the source, adapters, resources, and the reward function of a script."""

import pytest

from areal.api.config import AdaptiveEntropyConfig, GRPOConfig
from areal.api.config.load import read
from areal.importers.draft import nested
from areal.importers.own import from_areal
from tests.importers.drafts import fates, values

BASE = {"experiment_name": "e", "trial_name": "t", "allocation_mode": "sglang:d1+d1", "gconfig": {"n_samples": 2}}
BASE |= {"train_dataset": {"path": "rows.jsonl", "batch_size": 2}}
ACTOR = {"path": "m", "optimizer": {"lr": 1e-6}}


@pytest.mark.parametrize(
    ("inputs", "is_missing"),
    [
        ({}, True),
        ({"reward_fn": "exact"}, False),
        ({"reward": {"fns": {"math": 1.0}}}, False),
        ({"train_dataset": {"path": "openai/gsm8k"}}, False),
        ({"rollout": {"agent": {"agent_cls_path": "my.Agent"}}}, False),
    ],
)
def test_the_reward_function_of_a_script_is_missing_unless_the_file_chooses_one(inputs, is_missing):
    draft = from_areal(BASE | {"actor": ACTOR} | inputs)
    note = draft.notes.get("reward_fn")
    assert (note is not None and note.fate == "missing") == is_missing


def test_keys_of_adapters_name_their_own_options():
    keys = {"use_lora": True, "lora_rank": 16, "lora_alpha": 16, "target_modules": ["q_proj"]}
    draft = from_areal(BASE | {"actor": ACTOR | keys})
    texts = [draft.notes[f"actor.{key}"].text for key in ("lora_rank", "lora_alpha", "target_modules")]
    assert texts == ["actor.lora.rank=16", "actor.lora.alpha=16.0", "actor.lora.target_modules=['q_proj']"]
    assert fates(draft, "actor.use_lora") == ["computed"]
    assert {option for option in draft.options if option.startswith("actor.lora.")} == {
        f"actor.lora.{name}" for name in ("rank", "alpha", "target_modules")
    }


def test_adapters_with_their_defaults_are_not_lost():
    draft = from_areal(BASE | {"actor": ACTOR | {"use_lora": True}})
    assert values(draft, "actor.lora.rank") == (32,)


def test_resources_that_set_no_option_have_a_reason_of_their_own():
    draft = from_areal(BASE | {"actor": ACTOR | {"scheduling_spec": [{"gpu": 1}]}})
    note = draft.notes["actor.scheduling_spec"]
    assert (note.fate, "see below" in note.text) == ("dropped", False)
    draft = from_areal(BASE | {"actor": ACTOR | {"scheduling_spec": [{"gpu": 1, "cpu": 7}]}})
    assert fates(draft, "actor.scheduling_spec") == ["computed"]


def test_a_supervised_file_with_an_actor_keeps_the_names_of_its_keys():
    tree = {name: BASE[name] for name in ("experiment_name", "trial_name")}
    tree |= {"allocation_mode": "d1", "actor": ACTOR, "train_dataset": {"path": "d", "type": "rw"}}
    draft = from_areal(tree)
    assert draft.notes["actor.path"].text == "model.path"
    assert (draft.options["model.path"].value, draft.options["model.path"].origin) == ("m", "AReaL: actor.path")
    assert not [key for key in draft.notes if key.startswith("model.")]


AENT = {"entropy_coeff": 2e-4, "entropy_clamp": 0.4, "entropy_high": 0.23, "entropy_low": 0.05, "coeff_lr": 2e-3}
AENT |= {"coeff_box_high": 3e-3, "coeff_box_low": 2e-5, "warmup_steps": 29}


def test_the_section_of_the_recipe_aent_becomes_the_entropy_options():
    draft = from_areal(BASE | {"actor": ACTOR | {"aent": AENT | {"adaptive_coeff": True}}})
    config = read(GRPOConfig, nested({path: item.value for path, item in draft.options.items()})).config
    box = AdaptiveEntropyConfig(
        entropy_low=0.05, entropy_high=0.23, coef_lr=2e-3, coef_low=2e-5, coef_high=3e-3, warmup_steps=30
    )
    assert (config.actor.entropy_coef, config.actor.entropy_clamp, config.actor.adaptive_entropy) == (2e-4, 0.4, box)
    assert {note.fate for key, note in draft.notes.items() if key.startswith("actor.aent")} == {"computed", "dropped"}


@pytest.mark.parametrize(
    ("aent", "expected"),
    [
        (AENT | {"adaptive_coeff": False}, (2e-4, 0.4, None)),
        ({"adaptive_coeff": True}, (1e-3, 0.2, AdaptiveEntropyConfig(warmup_steps=1))),
        ({}, (1e-3, 0.2, None)),
        (None, (0.0, 0.0, None)),
    ],
)
def test_what_the_recipe_aent_leaves_out_has_its_defaults(aent, expected):
    draft = from_areal(BASE | {"actor": ACTOR | {"aent": aent}})
    actor = read(GRPOConfig, nested({path: item.value for path, item in draft.options.items()})).config.actor
    assert (actor.entropy_coef, actor.entropy_clamp, actor.adaptive_entropy) == expected
    assert "missing" not in [note.fate for key, note in draft.notes.items() if key.startswith("actor.aent")]
