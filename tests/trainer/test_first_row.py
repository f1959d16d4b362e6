"""The trial of the first row: what fails every episode is found before anything starts."""

import dataclasses
import json
from types import SimpleNamespace

import jinja2
import pytest

from areal.api.config import (
    ClusterSpecConfig,
    EvaluatorConfig,
    GenerationHyperparameters,
    NativeServerConfig,
    PPOActorConfig,
    PPOConfig,
    RewardConfig,
    TrainDatasetConfig,
    ValidDatasetConfig,
)
from areal.api.config.train import LoRAConfig
from areal.api.errors import ConfigError
from areal.trainer import first_row
from areal.trainer.first_row import Trial, try_first_row
from tests.environments.environment_kit import FAKES
from tests.workflow.conftest import CharTokenizer

BROKEN = """
import missing_module_of_a_test

def good(prompt, completion, prompt_ids, completion_ids, **row):
    return 1.0
"""
GOOD = """
def good(prompt, completion, prompt_ids, completion_ids, answer, **row):
    assert (prompt, completion) == ("2+2=", "0")
    return {"score": 1.0}

def raises(prompt, completion, prompt_ids, completion_ids, **row):
    return int("x")

def nothing(prompt, completion, prompt_ids, completion_ids, **row):
    pass

def other_column(prompt, completion, prompt_ids, completion_ids, solution):
    return 1.0
"""


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    monkeypatch.setattr(first_row, "tokenizer_of", lambda config, path: CharTokenizer())
    (tmp_path / "model").mkdir()
    (tmp_path / "rewards.py").write_text(GOOD)
    (tmp_path / "broken.py").write_text(BROKEN)

    def make(reward_fn="good", *, rows=({"prompt": "2+2=", "answer": "4"},), context=64, model="model", **options):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path, named = tmp_path / "rewards.py", ":" in reward_fn or not reward_fn
        return PPOConfig(
            experiment_name="e",
            trial_name="t",
            allocation_mode="native:d1+fsdp:d1",
            cluster=ClusterSpecConfig(fileroot=str(tmp_path)),
            train_dataset=TrainDatasetConfig(path=str(tmp_path / "rows.jsonl"), batch_size=1),
            actor=PPOActorConfig(path=str(tmp_path / model) if model == "model" else model),
            native=NativeServerConfig(context_length=context),
            gconfig=GenerationHyperparameters(max_new_tokens=8),
            reward_fn=reward_fn if named else f"{path}:{reward_fn}",
            **options,
        )

    return make


def codes_of(config):
    return [problem.code for problem in try_first_row(config).problems]


def test_a_usable_row_has_its_prompt_and_no_problem(config_of):
    result = try_first_row(config_of())
    assert (result.prompt, result.num_tokens, result.problems, result.warnings) == ("2+2=", 4, [], [])


@pytest.mark.parametrize(
    ("reward_fn", "code"), [("nothing", "reward.not_a_number"), ("other_column", "reward.missing_column")]
)
def test_a_reward_that_fails_for_every_answer_is_a_problem(config_of, reward_fn, code):
    assert codes_of(config_of(reward_fn)) == [code]


def test_the_time_of_the_reward_functions_is_that_of_a_train_step(config_of, monkeypatch):
    times = iter([10.0, 13.0])
    monkeypatch.setattr("areal.trainer.first_row.time", SimpleNamespace(perf_counter=lambda: next(times)))
    config = config_of(reward=RewardConfig(workers=2))
    answers = config.train_dataset.batch_size * config.gconfig.n_samples
    text = f"3.000 s for row 0: {answers * 3 / 2:,.1f} s for the {answers} answers of a train step on 2 workers"
    assert text in try_first_row(config).reward_time


def test_a_reward_whose_module_cannot_be_imported_is_a_problem(config_of, tmp_path):
    result = try_first_row(config_of("", reward=RewardConfig(fns={f"{tmp_path / 'broken.py'}:good": 1.0})))
    assert [problem.code for problem in result.problems] == ["reward.cannot_load"]
    assert "missing_module_of_a_test" in result.problems[0].message


@pytest.mark.parametrize(("column", "count"), [("images", 1), ("pictures", 0)])
def test_a_row_whose_images_the_workflow_does_not_give_to_the_model_is_a_warning(config_of, column, count):
    result = try_first_row(config_of(rows=({"prompt": "2+2=", "answer": "4", column: ["a.png"]},)))
    assert (len(result.warnings), result.problems) == (count, [])


def test_a_reward_that_raises_for_the_dummy_answer_is_a_warning(config_of):
    result = try_first_row(config_of("raises"))
    assert result.problems == []
    (warning,) = result.warnings
    assert "ValueError" in warning


def test_a_prompt_and_answer_beyond_the_context_are_a_problem(config_of):
    assert codes_of(config_of(context=12)) == []
    assert codes_of(config_of(context=11)) == ["request.too_long"]


@pytest.mark.parametrize(
    ("row", "code"), [({"question": "2+2="}, "data.missing_column"), ({"prompt": 5}, "data.invalid_column")]
)
def test_a_row_without_a_usable_prompt_is_a_problem(config_of, row, code):
    assert codes_of(config_of(rows=[row])) == [code]


def test_a_map_fn_that_raises_is_a_problem(config_of, tmp_path):
    (tmp_path / "maps.py").write_text("def broken(row):\n    return row['missing']\n")
    config = config_of()
    data = TrainDatasetConfig(path=config.train_dataset.path, map_fn=f"{tmp_path / 'maps.py'}:broken")
    config = PPOConfig(**{**vars(config), "train_dataset": data})
    assert codes_of(config) == ["data.map_fn_failed"]


def test_a_workflow_that_cannot_be_made_is_a_problem(config_of, tmp_path):
    (tmp_path / "own.py").write_text("class Own:\n    def __init__(self):\n        raise ValueError('no')\n")
    result = try_first_row(config_of(workflow=f"{tmp_path / 'own.py'}:Own"))
    assert [problem.code for problem in result.problems] == ["launch.first_row"]
    assert "own.py:3" in result.problems[0].message


def test_a_model_that_the_hub_does_not_have_is_a_problem(config_of, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = try_first_row(config_of(model="no-such-owner/no-such-model"))
    assert [problem.code for problem in result.problems] == ["model.not_found"]
    assert result.problems[0].path == "actor.path"
    assert result.problems[0].message.startswith("no-such-owner/no-such-model is neither a folder ")


def test_a_held_out_set_without_the_columns_of_the_reward_is_refused(config_of, tmp_path):
    usable, other = tmp_path / "usable.jsonl", tmp_path / "other.jsonl"
    usable.write_text(json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n")
    other.write_text(json.dumps({"prompt": "2+2=", "solution": "4"}) + "\n")
    config = config_of(valid_dataset=ValidDatasetConfig(path=str(usable)))
    assert codes_of(config) == []
    config = config_of(
        valid_dataset=ValidDatasetConfig(path=str(usable)), evaluator=EvaluatorConfig(sets={"hard": str(other)})
    )
    (problem,) = try_first_row(config).problems
    assert problem.path == "evaluator.sets.hard, row 0"
    assert [problem.code] == codes_of(config_of(rows=[{"prompt": "2+2=", "solution": "4"}]))


AGENT = """
def stock(item: str) -> str:
    return "57"

async def run(row, client, session):
    return 1.0
"""


class ToolTokenizer(CharTokenizer):
    """A chat template that shows the names of the tools."""

    def apply_chat_template(self, conversation, *, tools=(), **options):
        return f"{[tool['function']['name'] for tool in tools]}" + super().apply_chat_template(conversation, **options)


def agent_prompt(config, row):
    return Trial(config=config, tokenizer=ToolTokenizer(), workflow=None, images=None, row=row).prompt()


def test_the_first_prompt_of_tools_is_the_row_with_the_tools_and_other_agents_have_none(config_of, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(AGENT)
    tools = config_of(workflow="agent", workflow_args={"tools": [f"{path}:stock"]})
    assert agent_prompt(tools, {"prompt": "gdi?"}).text == "['stock']<s>user\ngdi?<e>\n<s>assistant\n"
    ours = config_of(workflow="agent", workflow_args={"agent": f"{path}:run"})
    assert agent_prompt(ours, {"prompt": "gdi?"}) is None
    command = config_of(workflow="agent", workflow_args={"command": ["true"]})
    assert agent_prompt(command, {"prompt": "gdi?"}) is None


@pytest.mark.parametrize(
    ("name", "row", "code"),
    [("missing", {"prompt": "gdi?"}, "config.bad_reference"), ("stock", {"question": "gdi?"}, "agent.no_messages")],
)
def test_a_missing_tool_or_message_of_an_agent_is_found_before_the_start(config_of, tmp_path, name, row, code):
    (tmp_path / "agent.py").write_text(AGENT)
    config = config_of(workflow="agent", workflow_args={"tools": [f"{tmp_path / 'agent.py'}:{name}"]})
    with pytest.raises(ConfigError) as error:
        agent_prompt(config, row)
    assert error.value.code == code


def test_a_value_that_json_cannot_represent_is_a_problem(config_of, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    row = {"prompt": "2+2=", "answer": "4", "raw": b"x"}
    parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    data = TrainDatasetConfig(path=str(tmp_path / "rows.parquet"), batch_size=1)
    (problem,) = try_first_row(dataclasses.replace(config_of(), train_dataset=data)).problems
    assert problem.code == "reward.row_not_json"
    assert "'raw'" in problem.message


def test_a_chat_template_with_a_wrong_syntax_is_a_problem(config_of, monkeypatch):
    def refuse(tokenizer, conversation, **options):
        raise jinja2.TemplateSyntaxError("unexpected '}'", 1)

    monkeypatch.setattr(CharTokenizer, "apply_chat_template", refuse)
    rows = ({"messages": [{"role": "user", "content": "2+2="}], "answer": "4"},)
    assert codes_of(config_of(rows=rows)) == ["data.template_refused"]


@pytest.mark.parametrize(
    ("body", "warns"),
    [
        ("await client.x()", True),
        ("return", True),
        ("return 1.0", False),
        ("session.reward(1.0)", False),
        ("post(base + '/reward')", False),
    ],
)
def test_an_agent_that_gives_no_reward_is_warned_of_where_no_function_does(config_of, tmp_path, body, warns):
    path = tmp_path / "agent.py"
    path.write_text(f"async def run(row, client, session):\n    {body}\n")
    for reward_fn in ("", "good"):
        config = config_of(reward_fn, workflow="agent", workflow_args={"agent": f"{path}:run"})
        result = try_first_row(config)
        assert result.problems == []
        assert any("session.reward()" in text for text in result.warnings) == (warns and not reward_fn)


@pytest.mark.parametrize("mode", ["auto", "adapter"])
def test_an_older_policy_in_a_row_is_refused_where_servers_get_whole_weights(config_of, monkeypatch, mode):
    monkeypatch.chdir(FAKES)
    row = {"env": "Race-v0", "config": {"opponent": {"steps": 4}}, "seed": 4, "index": 1}
    config = config_of("", rows=[row], workflow="textarena")
    config = dataclasses.replace(
        config, actor=dataclasses.replace(config.actor, lora=LoRAConfig(), adapter_update_mode=mode)
    )
    assert codes_of(config) == (["config.missing_requirement"] if mode == "auto" else [])
