"""LoRA against peft: loss and gradients, adapters in both directions, merged weights, the base model, bad input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from areal.api.config.train import LoRAConfig
from areal.api.errors import ArealError
from areal.engine.lora import _targets
from tests.expect import raises_code

PREFIX = "base_model.model."
NAMES = ["q_proj", "v_proj", "down_proj"]
OPTIONS = {
    "names": LoRAConfig(rank=4, alpha=6, target_modules=NAMES),
    "all-linear": LoRAConfig(rank=2, alpha=4),
    "pattern": LoRAConfig(rank=3, alpha=2, target_modules=r".*layers\.1\..*(k_proj|o_proj)"),
    "rslora": LoRAConfig(rank=4, alpha=2, target_modules=NAMES, rslora=True),
    "saved": LoRAConfig(rank=2, alpha=4, target_modules=NAMES, modules_to_save=["lm_head", "norm"]),
    "pissa": LoRAConfig(rank=4, alpha=6, target_modules=NAMES, init="pissa"),
    "olora": LoRAConfig(rank=4, alpha=6, target_modules=NAMES, init="olora", rslora=True),
}


def peft_config(options: LoRAConfig, init: bool | str) -> LoraConfig:
    return LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules=options.target_modules, use_rslora=options.rslora,
        lora_dropout=options.dropout, init_lora_weights=init, modules_to_save=options.modules_to_save or None,
        task_type="CAUSAL_LM",
    )  # fmt: skip


def base_model(path: Path):
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


def adapter_of(engine, folder: Path) -> dict[str, torch.Tensor]:
    engine.save_adapter(folder)
    return load_file(folder / "adapter_model.safetensors")


def loss_of(model, batch) -> torch.Tensor:
    """`engine_cases.policy_loss` of the mean, by a Hugging Face model, each sequence alone."""
    result = []
    for ids in batch.input_ids.split(batch.sequence_lengths):
        logprobs = F.log_softmax(model(ids[None], use_cache=False).logits[0].float(), -1)
        result.append(F.pad(logprobs[:-1].gather(-1, ids[1:, None]).squeeze(-1), (0, 1)))
    terms = (batch.advantages * torch.cat(result).mul(0.3).exp())[batch.loss_mask]
    return terms.sum() / batch.loss_mask.sum()


@pytest.mark.parametrize("kind", OPTIONS)
def test_loss_and_gradients_are_those_of_peft(cases, models, tmp_path, kind):
    options, batch = OPTIONS[kind], cases.make_batch()
    start = options.init in ("pissa", "olora")
    other = get_peft_model(base_model(models / "qwen3"), peft_config(options, options.init if start else False))
    if not start:  # random A and B
        other.save_pretrained(tmp_path / "peft")
        options = replace(options, path=str(tmp_path / "peft"))
    engine = cases.make_engine(models / "qwen3", lora=options)
    expected = loss_of(other, batch)
    expected.backward()
    before = adapter_of(engine, tmp_path / "before")
    metrics = cases.train(engine, batch)
    after = adapter_of(engine, tmp_path / "after")
    assert metrics["loss"].total / metrics["loss"].count == pytest.approx(expected.item(), abs=1e-6)
    gradients = {
        name.replace(".default", "").replace(".modules_to_save", ""): each.grad
        for name, each in other.named_parameters()
        if each.requires_grad
    }
    assert gradients.keys() == before.keys()
    for name, gradient in gradients.items():
        actual = before[name] - after[name]
        ours = actual.narrow(1 if ".lora_B" in name else 0, 0, gradient.shape[1 if ".lora_B" in name else 0])
        torch.testing.assert_close(ours, gradient, rtol=0, atol=1e-6, msg=name)
        assert gradient.abs().max() > 1e-4, name


@pytest.mark.parametrize("kind", OPTIONS)
def test_peft_and_transformers_compute_what_the_engine_computes(cases, models, tmp_path, kind):
    batch = cases.make_batch()
    engine = cases.make_engine(models / "qwen3", lora=OPTIONS[kind], optimizer=cases.ADAM)
    untrained = engine.forward(batch).logprobs
    cases.train(engine, batch, steps=2)
    logprobs = engine.forward(batch).logprobs
    assert (logprobs - untrained).abs().max() > 1e-3
    engine.save_adapter(tmp_path / "adapter")
    engine.save(tmp_path / "merged", with_optimizer=False)
    loaded = PeftModel.from_pretrained(base_model(models / "qwen3"), tmp_path / "adapter")
    for model in (loaded, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
        result = []
        with torch.no_grad():
            for ids in batch.input_ids.split(batch.sequence_lengths):
                distribution = F.log_softmax(model(ids[None], use_cache=False).logits[0].float(), -1)
                result.append(F.pad(distribution[:-1].gather(-1, ids[1:, None]).squeeze(-1), (0, 1)))
        torch.testing.assert_close(torch.cat(result), logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["names", "saved", "pissa"])
def test_without_adapters_it_is_the_base_model_and_nothing_else_changes(cases, models, kind):
    batch = cases.make_batch()
    base = cases.make_engine(models / "qwen3").forward(batch).logprobs
    engine = cases.make_engine(models / "qwen3", lora=OPTIONS[kind], optimizer=cases.ADAM)
    cases.train(engine, batch, steps=2)
    trained = engine.forward(batch).logprobs
    assert torch.equal(engine.forward(batch, with_adapters=False).logprobs, base)
    assert torch.equal(engine.forward(batch).logprobs, trained)


def test_dropout_has_the_mask_of_peft(cases, models, tmp_path):
    options = replace(OPTIONS["names"], target_modules=["down_proj"], dropout=0.4)
    torch.manual_seed(4)
    batch = cases.make_batch([9])  # one sequence: the masks have the same shape
    other = get_peft_model(base_model(models / "qwen3"), peft_config(options, False))
    other.save_pretrained(tmp_path / "peft")
    engine = cases.make_engine(models / "qwen3", lora=replace(options, path=str(tmp_path / "peft")))
    torch.manual_seed(3)
    expected = loss_of(other.train(), batch)
    torch.manual_seed(3)
    metrics = cases.train(engine, batch)
    assert metrics["loss"].total / metrics["loss"].count == pytest.approx(expected.item(), abs=1e-6)
    assert loss_of(other.eval(), batch).item() != pytest.approx(expected.item(), abs=1e-6)


def test_default_and_gaussian_start_at_the_base_model_with_the_spread_of_peft(cases, models, tmp_path):
    batch, spreads = cases.make_batch(), {}
    base = cases.make_engine(models / "qwen3").forward(batch).logprobs
    for init, name in (("default", True), ("gaussian", "gaussian")):
        options = LoRAConfig(rank=16, alpha=16, init=init)
        engine = cases.make_engine(models / "qwen3", lora=options)
        assert torch.equal(engine.forward(batch).logprobs, base)
        other = get_peft_model(base_model(models / "qwen3"), peft_config(replace(options, target_modules=NAMES), name))
        ours = [value for key, value in adapter_of(engine, tmp_path / init).items() if ".lora_A" in key]
        theirs = [value for key, value in other.named_parameters() if ".lora_A" in key]
        spreads[init] = [torch.cat([each.flatten() for each in every]).std().item() for every in (ours, theirs)]
    for ours, theirs in spreads.values():
        assert ours == pytest.approx(theirs, rel=0.15)


def test_only_adapters_are_in_optimiser_and_checkpoint(cases, models, tmp_path):
    engine = cases.make_engine(models / "qwen3", lora=OPTIONS["names"], optimizer=cases.ADAM)
    cases.train(engine, cases.make_batch())
    engine.save(tmp_path / "recover", with_optimizer=True)
    stored = load_file(tmp_path / "recover" / "rank-00000-of-00001.safetensors")
    kinds = ("weights/", "optimizer/")
    assert all(".lora_" in name for name in stored)
    assert all(any(name.startswith(kind) for name in stored) for kind in kinds)


def other_base(models: Path, folder: Path) -> Path:
    """The model qwen3 with one weight changed."""
    model = base_model(models / "qwen3")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_a_checkpoint_of_another_base_or_of_other_settings_is_refused(cases, models, tmp_path):
    lora, other = OPTIONS["names"], other_base(models, tmp_path / "other")
    cases.make_engine(models / "qwen3", lora=lora, optimizer=cases.ADAM).save(tmp_path / "r", with_optimizer=True)
    for path, options in ((other, lora), (models / "qwen3", replace(lora, alpha=7)), (models / "qwen3", None)):
        with raises_code("checkpoint.other_base"):
            cases.make_engine(path, lora=options, optimizer=cases.ADAM).load(tmp_path / "r")


def changed_config(folder: Path, **changes) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_an_adapter_of_another_base_is_refused(cases, models, tmp_path):
    lora = OPTIONS["names"]
    cases.make_engine(models / "qwen3", lora=lora).save_adapter(tmp_path / "own")
    theirs = get_peft_model(base_model(models / "qwen3"), peft_config(lora, False))
    theirs.save_pretrained(tmp_path / "theirs")
    other = other_base(models, tmp_path / "other")
    for adapter in ("own", "theirs"):
        cases.make_engine(models / "qwen3", lora=replace(lora, path=str(tmp_path / adapter)))
        for base in (other, models / "llama"):
            with raises_code("adapter.other_base"):
                cases.make_engine(base, lora=replace(lora, path=str(tmp_path / adapter)))
    changed_config(tmp_path / "theirs", base_model_name_or_path="elsewhere/base")
    cases.make_engine(other, lora=replace(lora, path=str(tmp_path / "theirs")))  # nothing shows that it is another


@pytest.mark.parametrize(
    "changes", [{"r": 5}, {"lora_alpha": 7}, {"use_rslora": True}, {"use_dora": True}, {"bias": "all"},
                {"rank_pattern": {"q_proj": 2}}, {"init_lora_weights": "pissa"}, {"peft_type": "LOHA"}],
)  # fmt: skip
def test_an_adapter_with_other_settings_is_refused(cases, models, tmp_path, changes):
    lora = OPTIONS["names"]
    cases.make_engine(models / "qwen3", lora=lora).save_adapter(tmp_path / "own")
    changed_config(tmp_path / "own", **changes)
    with raises_code("adapter.other_settings", next(iter(changes))):
        cases.make_engine(models / "qwen3", lora=replace(lora, path=str(tmp_path / "own")))


def test_a_folder_that_is_no_adapter_or_has_other_weights_is_refused(cases, models, tmp_path):
    lora = OPTIONS["names"]
    with raises_code("adapter.not_readable"):
        cases.make_engine(models / "qwen3", lora=replace(lora, path=str(tmp_path)))
    cases.make_engine(models / "qwen3", lora=lora).save_adapter(tmp_path / "own")
    file = tmp_path / "own" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file(dict(list(tensors.items())[:-1]), file, metadata={"format": "pt"})
    with raises_code("adapter.other_settings"):
        cases.make_engine(models / "qwen3", lora=replace(lora, path=str(tmp_path / "own")))


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        ({"target_modules": ["q_proj", "w_qkv"]}, "adapter.no_target", ["w_qkv", "k_proj"]),
        ({"target_modules": r".*\.w_qkv"}, "adapter.no_target", ["w_qkv", "k_proj"]),
        ({"target_modules": ["lm_head"]}, "adapter.no_target", ["lm_head"]),
        ({"modules_to_save": ["score"]}, "adapter.no_target", ["score", "lm_head"]),
        ({"modules_to_save": ["embed_tokens"]}, "model.unsupported", ["embed_tokens", "lm_head"]),
        ({"rank": 999, "init": "pissa"}, "adapter.rank", ["999"]),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(cases, models, changes, code, values):
    with pytest.raises(ArealError) as caught:
        cases.make_engine(models / "qwen2", lora=replace(LoRAConfig(), **changes))  # tied embeddings
    assert caught.value.code == code
    assert [value for value in values if value not in str(caught.value)] == []


SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("targets", "is_told"), [("all-linear", True), (SEVEN, True), (SEVEN[:4], False), (["o_proj", "w1"], False)]
)
def test_the_experts_and_routers_of_a_model_stay_frozen_and_a_line_says_so(cases, models, caplog, targets, is_told):
    engine = cases.make_engine(models / "qwen3_moe", lora=LoRAConfig(rank=2, target_modules=targets))
    adapted = {name.rpartition(".")[2] for name in engine._lora.adapters.layers}
    assert adapted == set(SEVEN[:4] if targets != ["o_proj", "w1"] else ["o_proj"])
    assert ("experts" in caplog.text and "stay frozen" in caplog.text) is is_told


@pytest.mark.parametrize("targets", [["gate_proj"], ["down_proj", "up_proj"], ["q_proj", "w_qkv"]])
def test_targets_that_choose_experts_alone_or_nothing_are_refused(cases, models, targets):
    with raises_code("adapter.no_target"):
        cases.make_engine(models / "qwen3_moe", lora=LoRAConfig(rank=2, target_modules=targets))


def test_a_linear_router_gets_an_adapter_only_by_name(monkeypatch):
    monkeypatch.setattr("areal.engine.lora.other_towers", lambda model: [])
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4), "gate": torch.nn.Linear(4, 3)})
    model["experts"] = torch.nn.Module()
    model["experts"].gate_up_proj = torch.nn.Parameter(torch.zeros(3, 8, 4))
    model.get_output_embeddings, model.get_decoder = lambda: None, torch.nn.Module
    model.config = PretrainedConfig()
    result = [list(_targets(model, LoRAConfig(target_modules=names))) for names in ("all-linear", ["gate", "q_proj"])]
    assert result == [["q_proj"], ["q_proj", "gate"]]


def test_a_model_without_lora_has_no_adapter_to_save(cases, models, tmp_path):
    with raises_code("adapter.none"):
        cases.make_engine(models / "qwen3").save_adapter(tmp_path / "adapter")


def test_the_adapter_of_a_tied_head_is_loaded_again(cases, models, tmp_path):
    """The checkpoint of such a model has no weight of the head."""
    lora = LoRAConfig(rank=2, target_modules=["q_proj", "output-head"])
    first = cases.make_engine(models / "qwen2", lora=lora)
    cases.train(first, cases.make_batch())
    first.lora.write(tmp_path, first.lora.named_weights())
    again = cases.make_engine(models / "qwen2", lora=replace(lora, path=str(tmp_path)))
    expected, actual = (dict(engine.lora.named_weights()) for engine in (first, again))
    assert any("lm_head" in name for name in expected)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())
