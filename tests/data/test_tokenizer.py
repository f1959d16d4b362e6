import sys
from types import SimpleNamespace

from areal.data.tokenizer import load_tokenizer
from tests.expect import raises_code


def test_a_folder_is_loaded(tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    ids = tokenizer.encode("5+5<|im_end|>")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "5+5"
    assert tokenizer.chat_template


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
