import sys
from dataclasses import replace
from datetime import date
from types import SimpleNamespace

from transformers import tokenization_utils_base

from areal.api.config import OptimizerConfig, SFTConfig, TrainDatasetConfig, TrainEngineConfig, check_config
from areal.api.config.data import TemplateConfig
from areal.data.tokenizer import load_tokenizer, tokenizer_of
from tests.expect import raises_code


def test_a_folder_is_loaded(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    ids = tokenizer.encode("5+5<|im_end|>")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "5+5"
    assert tokenizer.chat_template


def test_a_text_above_the_length_that_a_tokenizer_declares_has_no_warning(tokenizer_folder, monkeypatch):
    warned = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", lambda *args: warned.append(args))
    tokenizer = load_tokenizer(tokenizer_folder)
    monkeypatch.setattr(tokenizer, "model_max_length", 2)
    assert len(tokenizer.encode("5+5=10")) > 2
    assert not warned


def test_missing_and_broken_folders_are_named(tmp_path):
    with raises_code("data.no_tokenizer"):
        load_tokenizer("")
    with raises_code("data.no_tokenizer", "/nowhere/at/all"):
        load_tokenizer("/nowhere/at/all")
    with raises_code("data.no_tokenizer", "./nowhere"):
        load_tokenizer("./nowhere")
    (tmp_path / "tokenizer.json").write_text("{broken")
    with raises_code("data.no_tokenizer", tmp_path):
        load_tokenizer(tmp_path)


def test_an_unreachable_hub_is_said_so(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    def unreachable(name, file):
        raise LocalEntryNotFoundError("no answer")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with raises_code("data.no_tokenizer", "someone/model"):
        load_tokenizer("someone/model")

    def no_such_file(name, file):
        raise EntryNotFoundError("no file")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_such_file)

    class FakeAuto:  # the real one imports torch
        @staticmethod
        def from_pretrained(name):
            return f"auto {name}"

    module = SimpleNamespace(AutoTokenizer=FakeAuto)
    monkeypatch.setitem(sys.modules, "transformers.models.auto.tokenization_auto", module)
    assert load_tokenizer("someone/model") == "auto someone/model"


def test_a_folder_without_tokenizer_files_is_refused_instead_of_loaded_as_empty(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with raises_code("data.no_tokenizer", tmp_path):
        load_tokenizer(tmp_path)


def test_the_chat_template_of_a_run_has_its_own_text_and_fixed_variables(tmp_path, tokenizer_folder):
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% macro head() %}<{{ style.name }}|{{ none_given is none }}>{% endmacro %}{{ head() }}"
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if enable_thinking %}think{% endif %}"
    )
    name = 'a "quoted" \\ name, \u00e9 \U0001f600'
    args = {"enable_thinking": True, "style": {"name": name, "list": [1, None]}, "none_given": None}
    config = SFTConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode="d1",
        tokenizer_path=str(tokenizer_folder),
        chat_template=TemplateConfig(path=str(file), args=args),
        train_dataset=TrainDatasetConfig(path="d", type="sft"),
        model=TrainEngineConfig(path="m", optimizer=OptimizerConfig(lr=1.0)),
    )
    tokenizer = tokenizer_of(config, "m")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, enable_thinking=False)
    assert text == f"<{name}|True>xthink"
    with raises_code("data.chat_template_file"):
        tokenizer_of(replace(config, chat_template=TemplateConfig(path=str(tmp_path))), "m")
    check_config(config)
    for args in ({"a-b": 1}, {"when": date.today()}):
        with raises_code("config.conflict", "chat_template.args"):
            check_config(replace(config, chat_template=TemplateConfig(args=args)))
