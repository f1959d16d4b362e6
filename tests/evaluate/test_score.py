"""`areal score`: generations made elsewhere, any reward function, metrics by set and source."""

import json

import pytest
from tokenizers.processors import TemplateProcessing

from areal.api.errors import ArealError
from areal.cli.main import run_command
from areal.data.tiny_model import template_tokenizer
from areal.evaluate.samples import Sample, SampleKey, make_report, read_generations, read_samples, table, write_samples
from tests.expect import raises_code


def lines_file(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


QUESTIONS = (
    {"question": "3+5", "answer": "#### 8", "data_source": "sum", "response": ["#### 8", "8.0", "it is 9", "none"]},
    {"question": "2*3", "answer": "6", "data_source": "product", "response": ["5", "5", "so \\boxed{6}", "7"]},
)
"""2 of 4 correct with a right majority (8 = 8.0), then 1 of 4 correct with a wrong one."""


def test_scores_sets_and_sources_by_hand(tmp_path, capsys):
    file = lines_file(tmp_path / "made_elsewhere.jsonl", *QUESTIONS)
    out = tmp_path / "scored.jsonl"
    words = ["score", str(file), "reward_fn=gsm8k", "reward.workers=1", "--json", "-o", str(out)]
    assert run_command(words) == 0
    actual = {result["source"]: result for result in json.loads(capsys.readouterr().out)["results"]}
    means = {
        source: {name: value["mean"] for name, value in item["metrics"].items()} for source, item in actual.items()
    }
    by_hand = {
        "": {"mean@4": 3 / 8, "pass@1": 3 / 8, "pass@2": (5 / 6 + 1 / 2) / 2, "pass@4": 1.0, "majority@4": 1 / 2},
        "sum": {"mean@4": 1 / 2, "pass@1": 1 / 2, "pass@2": 5 / 6, "pass@4": 1.0, "majority@4": 1.0},
        "product": {"mean@4": 1 / 4, "pass@1": 1 / 4, "pass@2": 1 / 2, "pass@4": 1.0, "majority@4": 0.0},
    }
    assert {source: pytest.approx(item) for source, item in means.items()} == by_hand
    assert [actual[""][name] for name in ("set", "rows", "samples", "failed")] == ["made_elsewhere", 2, 8, 0]
    assert [sample.answer for sample in read_samples(out).values()] == ["8", "8", "9", None, "5", "5", "6", "7"]
    assert run_command(["score", str(out), "reward_fn=gsm8k", "-k", "2", "reward.workers=1"]) == 0  # its own output
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["given", "rows", "failed", "mean@4", "pass@2", "majority@4", "tokens", "finished"]
    assert [row.split()[0] for row in rows] == ["made_elsewhere", "product", "sum"]


@pytest.mark.parametrize(
    ("line", "words", "code"),
    [
        ({"question": "3+5", "answer": "8"}, [], "evaluate.no_output_column"),
        ({"output": "8", "answer": "8"}, ["--column", "text"], "evaluate.no_output_column"),
        ({"output": "8", "answer": "8"}, ["reward_fn=gsm9k"], "config.bad_reference"),
        ({"output": "8", "answer": "8"}, ["reward_fn="], "reward.none_given"),
        ({"output": "8", "gold": "8"}, [], "workflow.reward_failed"),
    ],
)
def test_wrong_use_has_a_code(tmp_path, line, words, code):
    file = lines_file(tmp_path / "file.jsonl", line)
    with raises_code(code):
        run_command(["score", str(file), "reward_fn=gsm8k", "reward.workers=1", *words])


def test_a_file_that_is_missing_or_broken(tmp_path):
    for content, code in ((None, "data.not_found"), ("", "data.no_rows"), ("{", "data.invalid_file")):
        file = tmp_path / f"{code}.jsonl"
        if content is not None:
            file.write_text(content)
        with raises_code(code):
            read_generations(file)


def test_a_configuration_of_another_training_is_refused(tmp_path):
    config = tmp_path / "sft.yaml"
    config.write_text("train_dataset: {type: sft}\nsft: {}\n")
    with pytest.raises(ArealError) as error:
        run_command(["score", str(lines_file(tmp_path / "f.jsonl", QUESTIONS[0])), "--config", str(config)])
    assert error.value.code in ("evaluate.no_generation", "config.mixed_kinds")


def test_lines_with_one_prompt_are_samples_of_one_row(tmp_path):
    file = lines_file(
        tmp_path / "g.jsonl",
        {"prompt": "a", "output": "1"},
        {"prompt": "b", "output": "2"},
        {"prompt": "a", "output": "3"},
        {"messages": [{"role": "user", "content": "a"}], "completion": "4"},
        {"text": "5"} | {"output": "5"},
    )
    keys = [(generation.output, generation.key.row, generation.key.sample) for generation in read_generations(file)]
    assert keys == [("1", 0, 0), ("2", 1, 0), ("3", 0, 1), ("4", 2, 0), ("5", 3, 0)]


def test_lines_whose_other_columns_differ_are_rows_unless_an_id_is_equal(tmp_path):
    lines = [
        {"prompt": "a", "answer": "1", "output": "1", "num_tokens": 3},
        {"prompt": "a", "answer": "2", "output": "1", "num_tokens": 4},
        {"num_tokens": 9, "output": "2", "answer": "1", "prompt": "a"},
    ]
    file = lines_file(tmp_path / "g.jsonl", *lines)
    keys = [
        (generation.data["answer"], generation.key.row, generation.key.sample) for generation in read_generations(file)
    ]
    assert keys == [("1", 0, 0), ("2", 1, 0), ("1", 0, 1)]
    file = lines_file(tmp_path / "i.jsonl", *({"id": number % 2, **line} for number, line in enumerate(lines)))
    assert [(generation.key.row, generation.key.sample) for generation in read_generations(file)] == [
        (0, 0),
        (1, 0),
        (0, 1),
    ]


def test_a_file_with_a_cut_last_line_keeps_the_whole_ones(tmp_path):
    path = tmp_path / "samples.jsonl"
    made = [
        Sample(key=SampleKey("sampled", "s", row, 0), data={"row": row}, output="x", reward=0.5, answer="x")
        for row in range(3)
    ]
    failed = Sample(key=SampleKey("sampled", "s", 3, 0), data={}, error="KeyError")
    write_samples(path, [*reversed(made), failed])
    assert list(read_samples(path).values()) == made  # sorted; failed ones are made again
    path.write_bytes(path.read_bytes()[: -len(failed.line()) - 5])
    assert list(read_samples(path).values()) == made[:2]


def test_the_table_of_an_agent_has_its_turns_and_tool_calls():
    key = SampleKey("sampled", "held_out", 0, 0)
    metrics = {"num_turns": 2.0, "tool_calls": 1.0, "queue_s": 0.5}
    head, row, *_ = table(
        make_report([Sample(key=key, data={}, reward=1.0, metrics=metrics)], correct_reward=1.0)
    ).splitlines()
    assert head.split()[-4:] == ["tokens", "finished", "num_turns", "tool_calls"]
    assert row.split()[-2:] == ["2", "1"]


@pytest.mark.parametrize(
    ("mode", "num_samples", "says"), [("sampled", 1, True), ("sampled", 2, False), ("greedy", 1, False)]
)
def test_the_table_points_out_one_sampled_answer_a_row(mode, num_samples, says):
    keys = [SampleKey(mode, "held_out", row, sample) for row in range(2) for sample in range(num_samples)]
    report = make_report([Sample(key=key, data={}, reward=1.0) for key in keys], correct_reward=1.0)
    assert ("-n 8" in table(report)) == says


def test_the_last_line_of_the_table_names_the_failed_answers_and_the_first_error():
    keys = [SampleKey("sampled", "held_out", row, 0) for row in range(3)]
    errors = ["", "KeyError: 'itm' (bad.py:28)", "ValueError: 1"]
    samples = [
        Sample(key=key, data={}, reward=None if error else 1.0, error=error)
        for key, error in zip(keys, errors, strict=True)
    ]
    report = make_report(samples, correct_reward=1.0)
    assert (report.num_failed, report.num_answers, report.first_error) == (2, 3, errors[1])
    last = table(report).splitlines()[-1]
    assert "warning" in last
    assert "2 of 3" in last
    assert errors[1] in last
    assert "warning" not in table(make_report(samples[:1], correct_reward=1.0))


@pytest.mark.parametrize(
    ("missing_reward", "by_agent", "mean"),
    [("zero", True, 0.5), ("zero", False, None), ("leave_out", False, 1.0), ("refuse", True, None)],
)
def test_answers_without_a_reward_count_as_configured(missing_reward, by_agent, mean):
    def key(row):
        return SampleKey("sampled", "test", row, 0)

    samples = [Sample(key=key(0), data={}, reward=1.0), Sample(key=key(1), data={}, error="x", by_agent=by_agent)]
    report = make_report(samples, correct_reward=1.0, missing_reward=missing_reward)
    (result,) = report.results
    assert (result.samples, result.failed) == (1, 1)
    assert (result.metrics["mean@1"].mean if result.metrics else None) == mean
    assert "1 of 2 answers" in table(report)


def test_a_prompt_that_begins_with_a_bos_gets_no_second_one(tmp_path, capsys):
    """The tokenizer adds one to every text; a prompt that the chat template rendered has it."""
    tokenizer = template_tokenizer("<s>{{ messages }}")
    start = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    assert tokenizer.encode("<s>ab")[:2] == [start, start]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = lines_file(tmp_path / "g.jsonl", {"prompt": "<s>ab", "output": "c", "weight": 0})
    words = [f"tokenizer_path={tmp_path / 'tokenizer'}", "reward_fn=tests.reward.reward_functions:echo_row"]
    assert run_command(["score", str(file), *words, "reward.workers=1", "-o", str(tmp_path / "out.jsonl")]) == 0
    (scored,) = read_samples(tmp_path / "out.jsonl").values()
    assert scored.reward == start + sum(tokenizer.encode("ab", add_special_tokens=False)) + 1
