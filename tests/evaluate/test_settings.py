"""The configuration of an evaluation: model, data, folder, and what is refused before anything starts."""

import json

import pytest

from areal.cli.main import run_command
from areal.evaluate.settings import Requested, evaluation_config, held_out_sets
from areal.launcher.job import make_plan
from areal.launcher.placement import Machine
from areal.system.run_paths import RunPaths
from tests.expect import raises_code


@pytest.fixture
def files(tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    (tmp_path / "reward.py").write_text("def f(prompt, completion, prompt_ids, completion_ids, **row): return 1.0\n")
    return tmp_path


def requested(files, *overrides, **options):
    options = {"model": "/some/model", "data": [str(files / "held_out.jsonl")]} | options
    words = [f"reward_fn={files}/reward.py:f", f"cluster.fileroot={files}/runs", *overrides]
    return Requested(files=[], overrides=words, **options)


def test_the_plan_has_servers_and_one_process(files):
    config = evaluation_config(requested(files, servers="native:d2"), scores=True)
    plan = make_plan(config, [Machine(cores=4)])
    assert [process.name for process in plan.processes] == ["controller", "server-0", "server-1"]
    assert plan.processes[0].argv[1:3] == ("-m", "areal.evaluate")
    assert plan.allocation == "native:d2+eval"


def test_one_command_has_one_folder_and_any_change_another(files):
    def folder(*overrides, scores=True, **options):
        return RunPaths.of(evaluation_config(requested(files, *overrides, **options), scores=scores)).root

    first = folder()
    assert folder() == first
    others = [
        folder("gconfig.temperature=0.5", "actor.temperature=0.5"), folder(num_samples=4), folder(greedy=True),
        folder(model="/other/model"), folder(scores=False), folder("agent.max_turns=2"),
        folder("vision.max_pixels=100"), folder(f"workflow_args.prompt={'long ' * 1000}"),
        folder(agent := f"workflow_args.agent={files}/agent.py:run"),
    ]  # fmt: skip
    (files / "agent.py").write_text("async def run(row, client, session): return 1.0\n")
    others.append(folder(agent))
    (files / "reward.py").write_text("def f(prompt, completion, prompt_ids, completion_ids, **row): return 2.0\n")
    others.append(folder())
    (files / "held_out.jsonl").write_text('{"prompt": "b", "answer": "1"}\n')
    others.append(folder())
    (files / "t.jinja").write_text("a")
    others.append(folder(template := f"chat_template.path={files}/t.jinja"))
    (files / "t.jinja").write_text("b")
    others.append(folder(template))
    for data in (f"{files}/held_*.jsonl", f"{files}/reward.py:rows"):
        others.append(folder(data=[data]))
        for name in ("held_out.jsonl", "reward.py"):
            (files / name).write_text((files / name).read_text() + "\n")
        others.append(folder(data=[data]))
    assert len({first, *others}) == 19


def test_sets_have_names(files):
    (files / "more.jsonl").write_text('{"prompt": "a"}\n')
    data = [str(files / "held_out.jsonl"), f"other={files}/more.jsonl"]
    config = evaluation_config(requested(files, "valid_dataset.path=x", data=data), scores=True)
    assert {name: item.path for name, item in held_out_sets(config).items()} == {
        "held_out": str(files / "held_out.jsonl"),
        "other": str(files / "more.jsonl"),
    }
    patterns = ["x/held-*.jsonl", "x/*.jsonl", "mine.py:rows"]
    configs = [evaluation_config(requested(files, data=[path]), scores=True) for path in patterns]
    assert [list(held_out_sets(config)) for config in configs] == [["held"], ["held_out"], ["mine"]]
    configured = ["valid_dataset.path=x.jsonl", "evaluator.sets.more=y.jsonl"]
    config = evaluation_config(requested(files, *configured, data=[]), scores=True)
    assert {name: item.path for name, item in held_out_sets(config).items()} == {"x": "x.jsonl", "more": "y.jsonl"}


def test_a_run_gives_its_configuration_and_its_newest_export(files):
    run = files / "runs" / "e" / "t"
    for step in (2, 10):
        (run / "checkpoints" / "actor" / f"step-{step:06d}").mkdir(parents=True)
    tree = {"train_dataset": {"path": "t.jsonl", "map_fn": "gsm8k"}, "reward_fn": "gsm8k", "actor": {"path": "m"}}
    tree |= {"experiment_name": "e", "trial_name": "t", "allocation_mode": "native:d1+fsdp:d1"}
    tree["actor"]["optimizer"] = {"lr": 1e-5}
    (run / "config.yaml").write_text(json.dumps(tree))

    def chosen(**options):
        data = [str(files / "held_out.jsonl")]
        return evaluation_config(Requested(files=[], overrides=[], data=data, model=str(run), **options), scores=True)

    assert (chosen().actor.path, chosen().reward_fn) == (str(run / "checkpoints/actor/step-000010"), "gsm8k")
    assert chosen().valid_dataset.map_fn == "gsm8k"  # as the training set
    assert (
        RunPaths.of(chosen()).images != RunPaths(run).images
    )  # from which the next controller of the run deletes some
    assert chosen(step=2).actor.path == str(run / "checkpoints/actor/step-000002")
    with raises_code("evaluate.no_export"):
        chosen(step=3)


@pytest.mark.parametrize("name", ["", "hard="])
def test_options_of_the_sets_need_no_path(files, name):
    path = str(files / "held_out.jsonl")
    config = evaluation_config(requested(files, "valid_dataset.map_fn=gsm8k", data=[name + path]), scores=True)
    [held_out] = held_out_sets(config).values()
    assert (held_out.path, held_out.map_fn) == (path, "gsm8k")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--data", "DATA"], "evaluate.no_model"),
        (["--model", "/m"], "evaluate.no_data"),
        (["--model", "/m", "--data", "DATA", "--data", "DATA"], "evaluate.no_data"),
        (["--model", "/m", "--step", "3", "--data", "DATA"], "evaluate.no_export"),
        (["--model", "/m", "--data", "DATA", "reward_fn=gsm8k"], "launch.missing_inputs"),  # there is no /m
        (["--model", "/m", "--data", "DATA"], "reward.none_given"),
        (["--model", "/m", "--data", "DATA", "reward_fn=gsm8k", "workflow=rlvrr"], "config.bad_reference"),
        (["--model", "/m", "--data", "DATA", "reward_fn=gsm8k", "evaluator.answer_fn=numbr"], "config.bad_reference"),
        (["--model", "/m", "--data", "/no/such.jsonl", "reward_fn=gsm8k"], "launch.missing_inputs"),
        (["--model", "/m", "--data", "DATA", "--servers", "fsdp:d1", "reward_fn=gsm8k"], "allocation.invalid"),
        (["--model", "/m", "--data", "DATA", "-n", "4", "gconfig.greedy=true", "reward_fn=gsm8k"], "config.conflict"),
        (["--model", "/m", "--data", "DATA", "-n", "4", "--greedy", "reward_fn=gsm8k"], "config.conflict"),
        (
            ["--model", "/m", "--data", "DATA", "-n", "4", "evaluator.modes=[greedy]", "reward_fn=gsm8k"],
            "config.conflict",
        ),
    ],
)
def test_what_is_wrong_is_refused_before_anything_starts(files, words, code):
    words = [word.replace("DATA", str(files / "held_out.jsonl")) for word in words]
    with raises_code(code):
        run_command(["eval", *words, f"cluster.fileroot={files}/runs"])
    assert not (files / "runs").exists()
