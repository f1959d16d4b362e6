"""`areal prove-template`: its facts, scopes and exit status."""

import json

import pytest

from areal.cli.main import run_command
from areal.data.tiny_model import template_tokenizer
from tests.agent.bridge import templates
from tests.expect import raises_code

FEW = ["--answers", "1", "--dialogues", "3", "--json"]


@pytest.fixture
def file_of(tmp_path):
    def write(template):
        path = tmp_path / "template.jinja"
        path.write_text(template)
        return str(path)

    return write


def prove(capsys, *words):
    status = run_command(["prove-template", *words])
    return status, json.loads(capsys.readouterr().out)


def test_a_proof(capsys, file_of):
    status, facts = prove(capsys, file_of(templates.CHATML), *FEW)
    assert (status, facts["proved"], facts["stops"]) == (0, True, ["</s>", "<|im_end|>"])
    assert {row["proved"] for row in facts["rows"]} == {True}
    assert facts["random"]["num_bridges"] > 0
    assert facts["random"]["num_different"] == 0


def test_a_counterexample_counts_in_the_declared_scope(capsys, file_of):
    path = file_of(templates.THINKING_STRIPPED)
    status, facts = prove(capsys, path, "--thinking", "on", *FEW)
    assert (status, facts["rows"][0]["counterexample"]) == (1, "U A(r,c) U")
    assert prove(capsys, path, "--thinking", "on", "--scope", "tools", *FEW)[0] == 0
    assert prove(capsys, path, *FEW)[0] == 0
    status, _ = prove(capsys, file_of(templates.ONE_CALL), "--scope", "one-call", *FEW)
    assert status == 0


def test_a_template_that_shows_no_calls_is_proved_for_answers_without_calls(capsys, file_of):
    path = file_of(templates.chatml(calls=""))
    status, facts = prove(capsys, path, *FEW)
    assert (status, facts["scope"], [row["answer"] for row in facts["rows"]]) == (0, "chat", ["A(c)"])
    assert prove(capsys, path, "--scope", "tools", *FEW)[0] == 1


def test_options_and_end_tokens_are_those_of_the_command_line(capsys, file_of):
    kept = templates.THINKING_STRIPPED.replace("loop.index0 > ns.last", "keep or loop.index0 > ns.last")
    status, facts = prove(capsys, file_of(kept), "--thinking", "on", "--option", "keep=true", *FEW)
    assert status == 0
    other = prove(capsys, file_of(kept), "--thinking", "on", "--option", "keep=false", "--stop", "<|return|>", *FEW)[1]
    assert (other["proved"], other["stops"][0]) == (False, "<|return|>")
    assert facts["template"] != other["template"]


def test_the_text_names_the_counterexample(capsys, file_of):
    assert run_command(["prove-template", file_of(templates.NO_PROMPT), "--answers", "1", "--dialogues", "2"]) == 1
    assert "no_prompt: U A(c) U" in capsys.readouterr().out


def test_a_folder_of_a_model(capsys, tmp_path):
    template_tokenizer(templates.CHATML).save_pretrained(tmp_path)
    assert prove(capsys, str(tmp_path), *FEW)[0] == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["none.jinja"], "data.not_found"),
        (["FILE", "--stop", "two tokens", "--tokenizer", "FOLDER"], "data.template_stop"),
        (["FILE", "--option", "x"], "config.bad_override"),
        (["FOLDER", "--tokenizer", "FOLDER"], "config.conflict"),
    ],
)
def test_what_cannot_be_loaded_is_an_error(words, code, file_of, tmp_path):
    template_tokenizer(templates.CHATML).save_pretrained(tmp_path / "folder")
    inputs = {"FILE": file_of(templates.CHATML), "FOLDER": str(tmp_path / "folder")}
    with raises_code(code):
        run_command(["prove-template", *(inputs.get(word, word) for word in words)])
