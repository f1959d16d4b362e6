"""The commands of SGLang and vLLM for models that take images, and what they cannot do with them."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal.api.config import GenerationHyperparameters, InferenceEngineConfig, LoRAConfig
from areal.fleet.server_backend import backend_named
from areal.models.vision_layout import FAMILIES
from tests.fleet.test_server_command import MODEL, command, config_of


@pytest.fixture
def vision_model(tmp_path):
    ids = {"image_token_id": 40, "video_token_id": 41, "vision_start_token_id": 42, "vision_end_token_id": 43}
    tower = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {"model_type": "qwen3_vl", "text_config": MODEL, "vision_config": tower, **ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 4, "merge_size": 2}))
    return str(tmp_path)


def test_servers_of_models_with_images_forget_features_and_report_logprobs_with_bans(vision_model):
    actor = {"path": vision_model}
    assert command(config_of("sglang", actor=actor)).env["SGLANG_VLM_CACHE_SIZE_MB"] == "0"
    assert "--logprobs-mode=processed_logprobs" in command(config_of("vllm", actor=actor)).argv
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in command(config_of("sglang")).env


def test_what_servers_cannot_do_with_images_is_refused(vision_model):
    def problems(backend, **changes):
        return [path for path, _ in backend_named(backend).problems(config_of(backend, actor=actor, **changes))]

    actor = {"path": vision_model}
    cached = {"rollout": InferenceEngineConfig(weight_update="keep_cache")}
    cut = {"gconfig": GenerationHyperparameters(max_new_tokens=8, top_p=0.9)}
    assert [problems(item, **cached) for item in ("native", "sglang", "vllm")] == [[], [], ["rollout.weight_update"]]
    assert [problems(item, **cut) for item in ("native", "sglang", "vllm")] == [[], [], ["gconfig.top_p"]]


def image_family(folder, family):
    """The files of a model of this family, without weights."""
    tower = {"model_type": "clip_vision_model", "patch_size": 4, "image_size": 8}
    config = {"model_type": family, "text_config": MODEL, "vision_config": tower, "image_token_id": 40}
    size = {"size": {"shortest_edge": 8}, "max_image_size": {"longest_edge": 8}, "patch_size": 4, "merge_size": 2}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(size))
    return {"path": str(folder)}


def test_families_of_images_are_served_or_refused_by_name(tmp_path):
    qwen = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}
    taken = {"native": set(FAMILIES), "sglang": qwen, "vllm": set(FAMILIES) - {"gemma3"}}
    for family in FAMILIES:
        actor = image_family(tmp_path, family)
        for name, families in taken.items():
            result = list(backend_named(name).problems(config_of(name, actor=actor)))
            assert [path for path, _ in result] == ([] if family in families else ["allocation_mode"])
            assert all(family in text for _, text in result)


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_adapters_that_may_be_in_a_vision_tower_are_published_merged_only(tmp_path, name):
    def problems(family, targets, mode="auto", exclude=()):
        actor = image_family(tmp_path, family) | {"adapter_update_mode": mode}
        lora = LoRAConfig(rank=2, target_modules=targets, exclude_modules=exclude or [])
        config = config_of(name, actor=actor | {"lora": lora})
        return [path for path, _ in backend_named(name).problems(config)]

    refused = ["actor.lora.target_modules"]
    for targets in ("all-linear", ["all-linear"], ["q_proj", "v_proj"]):
        assert problems("qwen3_vl", targets) == []
    for targets in (["q_proj", "v_proj", "qkv"], ["v_proj", "down_proj"], r".*\.layers\.0\..*"):
        assert problems("qwen2_5_vl", targets) == refused
        assert problems("qwen2_5_vl", targets, "merged") == []
    if name == "vllm":
        assert problems("internvl", "all-linear") == []
        assert problems("internvl", ["v_proj"]) == refused  # its tower may have layers of this name
        layers = ("vision_tower.encoder.layer.0.attention", "language_model.model.layers.0.self_attn")
        weights = {f"{layer}.{part}.weight": np.zeros((1, 1)) for layer in layers for part in ("v_proj", "k_proj")}
        save_file(weights, tmp_path / "model.safetensors")
        assert problems("internvl", ["v_proj"]) == refused
        assert problems("internvl", ["v_proj"], exclude=r".*\.vision_tower\..*") == []
        assert problems("internvl", ["v_proj"], exclude=["k_proj"]) == refused
        assert problems("internvl", r".*\.language_model\..*\.v_proj") == []


def test_vllm_neither_cuts_nor_resizes_images_and_says_so_to_users_who_ask_for_it(tmp_path):
    uncut = {"do_image_splitting": False, "do_resize": False}
    for family, settings in {"idefics3": uncut, "internvl": {"use_fast": False}, "qwen3_vl": None}.items():
        actor = image_family(tmp_path, family)
        words = [word for word in command(config_of("vllm", actor=actor)).argv if "mm-processor" in word]
        assert words == ([f"--mm-processor-kwargs={json.dumps(settings, separators=(',', ':'))}"] if settings else [])
        other = config_of("vllm", actor=actor, vllm={"mm_processor_kwargs": {"do_image_splitting": True}})
        problems = [path for path, _ in backend_named("vllm").problems(other)]
        assert problems == (["vllm.mm_processor_kwargs"] if settings else [])


def test_vllm_knows_the_names_of_a_llava_tower_by_an_extension(tmp_path):
    result = [command(config_of("vllm", actor=image_family(tmp_path, family))).argv for family in ("llava", "internvl")]
    assert "--worker-extension-cls=areal_vllm.llava.WorkerExtension" in result[0]
    assert "--worker-extension-cls=areal_vllm.extension.WorkerExtension" in result[1]


def test_sglang_does_not_resize_images(tmp_path):
    actor = image_family(tmp_path, "qwen2_vl")
    assert '--mm-process-config={"image":{"do_resize":false}}' in command(config_of("sglang", actor=actor)).argv
    other = config_of("sglang", actor=actor, sglang={"mm_process_config": {"image": {"max_pixels": 9}}})
    assert [path for path, _ in backend_named("sglang").problems(other)] == ["sglang.mm_process_config"]
