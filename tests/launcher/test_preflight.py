import dataclasses
import fcntl
import json
import os
import re
import shutil
import socket
import threading

import pytest

from areal.api.config import (
    ClusterSpecConfig,
    EvaluatorConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    RecoverConfig,
    RewardModelConfig,
    SFTConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
)
from areal.api.errors import ConfigError, LaunchError
from areal.data.row_check import count_rows
from areal.launcher import preflight
from areal.launcher.preflight import (
    check_not_complete,
    check_run_folder,
    disk_problem,
    earlier_run,
    function_problems,
    has_launcher,
    looks_local,
    make_run_folder,
    missing_inputs,
    newest_checkpoint,
    run_lock,
)
from areal.system.durable import publish_folder
from areal.system.run_paths import RunPaths
from tests.expect import raises_code


def sft_config(tmp_path, model="org/model", data="org/data", **recover):
    return SFTConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode="fsdp:d1",
        cluster=ClusterSpecConfig(fileroot=str(tmp_path)),
        train_dataset=TrainDatasetConfig(path=str(data), type="sft"),
        model=TrainEngineConfig(path=str(model), optimizer=OptimizerConfig()),
        recover=RecoverConfig(**recover),
    )


def test_paths_that_count_as_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    local = ["/x", "./x", "../x", "runs/a/b", "models/missing", "models"]
    assert [looks_local(path) for path in local] == [True] * len(local)
    assert [looks_local(path) for path in ("Qwen/Qwen3-0.6B", "gpt2", "")] == [False] * 3


def test_hub_names_are_not_checked_locally(tmp_path):
    assert missing_inputs(sft_config(tmp_path), None) == []


def test_every_missing_input_is_named_at_once(tmp_path):
    config = sft_config(tmp_path, model=tmp_path / "no-model", data="rows.jsonl")
    problems = missing_inputs(config, str(tmp_path / "no.py"))
    assert len(problems) == 3
    assert "no such script" in problems[0]
    assert "model.path" in problems[1]
    assert "train_dataset.path: rows.jsonl does not exist" in problems[2]


def test_model_folders(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (problem,) = missing_inputs(sft_config(tmp_path, model=model), None)
    assert "no config.json" in problem
    (model / "config.json").write_text("{}")
    (problem,) = missing_inputs(sft_config(tmp_path, model=model), None)
    assert "init_from_scratch=true" in problem
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert missing_inputs(sft_config(tmp_path, model=model), None) == []


@pytest.mark.parametrize("option", ["router_replay", "router_aux_loss_coef"])
def test_router_options_need_a_model_with_experts(tmp_path, option):
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    actor = PPOActorConfig(path=str(tmp_path), optimizer=OptimizerConfig(), **{option: True})  # type: ignore[arg-type]
    for experts, problems in (({}, 1), ({"num_experts": 4, "moe_intermediate_size": 4}, 0)):
        (tmp_path / "config.json").write_text(json.dumps(sizes | experts))
        result = [
            item for item in missing_inputs(ppo_config(tmp_path, actor=actor), "x.py") if f"actor.{option}" in item
        ]
        assert len(result) == problems


def ppo_config(tmp_path, **fields):
    return PPOConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode="native:d1+fsdp:d1",
        cluster=ClusterSpecConfig(fileroot=str(tmp_path)),
        train_dataset=TrainDatasetConfig(path="org/data"),
        **{"actor": PPOActorConfig(path="org/model", optimizer=OptimizerConfig()), "reward_fn": "exact"} | fields,
    )


def codes_of(config, *, has_script=False):
    return [(problem.path, problem.code) for problem in function_problems(config, has_script=has_script)]


@pytest.mark.parametrize(("workflow", "args"), [("rlvr", {}), ("multi_turn", {"max_turns": 2, "turn_discount": 1.0})])
def test_a_workflow_without_a_reward_is_refused_before_the_start(tmp_path, workflow, args):
    fields = {"workflow": workflow, "workflow_args": args}
    assert codes_of(ppo_config(tmp_path, reward_fn="", **fields)) == [("reward_fn", "reward.none_given")]
    assert codes_of(ppo_config(tmp_path, **fields)) == []
    model = RewardModelConfig(path="org/reward")
    assert codes_of(ppo_config(tmp_path, reward_fn="", reward_model=model, **fields)) == []
    assert codes_of(ppo_config(tmp_path, reward_fn="", **fields), has_script=True) == []


def test_remax_with_dialogues_is_refused_before_the_start(tmp_path):
    actor = PPOActorConfig(path="org/model", optimizer=OptimizerConfig(), adv_estimator="remax")
    args = {"max_turns": 2, "turn_discount": 1.0}
    config = ppo_config(tmp_path, actor=actor, workflow="multi_turn", workflow_args=args)
    assert codes_of(config) == [("actor.adv_estimator", "workflow.missing_parameter")]
    assert codes_of(ppo_config(tmp_path, actor=actor)) == []


def test_a_reward_model_without_a_head_is_refused_before_the_start(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    config = ppo_config(tmp_path, reward_model=RewardModelConfig(path=str(tmp_path)))
    write_weights(tmp_path / "one.safetensors", "model.norm.weight")
    (problem,) = missing_inputs(config, None)
    assert problem.startswith(f"reward_model.path: {tmp_path} has no scoring head (score.weight)")
    write_weights(tmp_path / "two.safetensors", "score.weight")
    assert missing_inputs(config, None) == []


def write_weights(file, name):
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def test_a_run_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with raises_code("launch.cannot_write", "cluster.fileroot"):
        make_run_folder(RunPaths(tmp_path / "file" / "run"))


def test_full_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: _Usage)
    with raises_code("launch.disk_full", "1 MiB", "64 MiB"):
        check_run_folder(sft_config(tmp_path), RunPaths(tmp_path))


class _Usage:
    free = 2**20


NAMES = ["metrics.jsonl", "ledger/events-000001.jsonl", "checkpoints/model/step-1/config.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", ["disabled", "fault"])
def test_an_earlier_run_is_not_overwritten(tmp_path, name, mode):
    recover = {"mode": mode, "freq_steps": 1}
    paths = RunPaths(tmp_path / "run")
    (paths.root / name).parent.mkdir(parents=True)
    (paths.root / name).touch()
    check_run_folder(sft_config(tmp_path, **recover), paths)  # nothing was trained: empty files
    (paths.root / name).write_text('{"event":"admitted","id":0}\n')
    with pytest.raises(ConfigError, match=name.split("/")[0]) as error:
        check_run_folder(sft_config(tmp_path, **recover), paths)
    assert error.value.code == "launch.earlier_run"
    check_run_folder(sft_config(tmp_path, mode="auto", freq_steps=1), paths)


def test_a_complete_run_is_not_trained_again_and_other_options_are_refused(tmp_path):
    paths, config = RunPaths(tmp_path / "run"), sft_config(tmp_path)
    (paths.recover / "next").mkdir(parents=True)
    (paths.recover / "next" / "state.json").write_text('{"point": {"goal_reached": {}}}')
    publish_folder(paths.recover / "next", paths.recover / "step-000008")
    assert check_not_complete(config, paths, total_steps=8, changes=[]) == ""  # it has not ended
    paths.summary.write_text('{"status": "completed"}')
    assert "--overwrite" in check_not_complete(config, paths, total_steps=8, changes=[])
    assert check_not_complete(config, paths, total_steps=9, changes=["seed: 1 -> 2"]) == ""
    with raises_code("launch.earlier_run"):
        check_not_complete(config, paths, total_steps=8, changes=["seed: 1 -> 2"])


@pytest.mark.parametrize(("goal", "continues"), [(0.97, False), (0.88, False), (0.98, True), (None, True)])
def test_a_run_that_reached_its_goal_is_complete_for_this_goal_and_lower_ones(tmp_path, goal, continues):
    paths = RunPaths(tmp_path / "run")
    evaluator = EvaluatorConfig(stop_at={} if goal is None else {"sampled": goal})
    config = dataclasses.replace(sft_config(tmp_path), evaluator=evaluator)
    (paths.recover / "next").mkdir(parents=True)
    (paths.recover / "next" / "state.json").write_text('{"point": {"goal_reached": {"sampled": 0.97}}}')
    publish_folder(paths.recover / "next", paths.recover / "step-000008")
    paths.summary.write_text('{"status": "completed"}')
    assert (check_not_complete(config, paths, total_steps=9, changes=[]) == "") == continues


def test_a_launch_that_ended_before_the_first_episode_may_be_repeated(tmp_path):
    paths = RunPaths(tmp_path / "run")
    paths.ledger.mkdir(parents=True)
    (paths.ledger / "events-000001.jsonl").write_text('{"event":"started","seed":1}\n')
    check_run_folder(sft_config(tmp_path, mode="disabled"), paths)


def test_the_newest_checkpoint_is_the_one_of_the_highest_step(tmp_path):
    paths = RunPaths(tmp_path / "run")
    for step in (999999, 1000000):
        (paths.recover / "next").mkdir(parents=True)
        publish_folder(paths.recover / "next", paths.recover / f"step-{step:06d}")
    assert newest_checkpoint(paths) == paths.recover / "step-1000000"


def test_resume_needs_a_complete_checkpoint(tmp_path):
    paths = RunPaths(tmp_path / "run")
    config = sft_config(tmp_path, mode="resume", freq_steps=1)
    (paths.recover / "step-000009").mkdir(parents=True)
    with raises_code("checkpoint.none_to_resume"):
        check_run_folder(config, paths)
    for step in (3, 7):
        (paths.recover / "next").mkdir()
        publish_folder(paths.recover / "next", paths.recover / f"step-{step:06d}")
    check_run_folder(config, paths)
    assert newest_checkpoint(paths) == paths.recover / "step-000007"


def test_rows_of_a_local_file(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"a": 1}\n\n{"a": 2}')
    assert count_rows(sft_config(tmp_path, data=data)) == 2
    assert count_rows(sft_config(tmp_path)) is None


@pytest.mark.parametrize(("folder", "is_refused"), [("file/cache", True), ("new/cache", False)])
def test_a_folder_of_a_cache_that_cannot_be_written_is_refused(tmp_path, folder, is_refused):
    (tmp_path / "file").write_text("")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    config = sft_config(tmp_path, data=tmp_path / "rows.jsonl")
    data = dataclasses.replace(config.train_dataset, cache_dir=str(tmp_path / folder))
    problems = missing_inputs(dataclasses.replace(config, train_dataset=data), None)
    assert any(problem.startswith("train_dataset.cache_dir: ") for problem in problems) is is_refused
    assert not (tmp_path / "new").exists()


def test_second_launcher_is_refused_with_pid_and_host(tmp_path):
    paths = RunPaths(tmp_path)
    refused = pytest.raises(LaunchError, match=rf"\b{os.getpid()}\b.*{re.escape(socket.gethostname())}")
    with run_lock(paths), refused as error, run_lock(paths):
        pass
    assert error.value.code == "launch.run_in_use"
    with run_lock(paths):
        assert json.loads(paths.lock.read_text())["pid"] == os.getpid()


def test_reading_the_lock_does_not_count_as_a_launcher(tmp_path):
    paths = RunPaths(tmp_path)
    assert not has_launcher(paths)
    with run_lock(paths):
        assert has_launcher(paths)
    assert not has_launcher(paths)
    with open(paths.lock) as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        threading.Timer(0.08, lambda: fcntl.flock(file, fcntl.LOCK_UN)).start()
        with run_lock(paths):
            pass


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    assert disk_problem(paths) == ""
    assert list(paths.root.iterdir()) == []

    def read_only(**_):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(preflight.tempfile, "TemporaryFile", read_only)
        assert "cannot write to" in disk_problem(paths)
        assert "Read-only file system" in disk_problem(paths)
        full = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - closed by whom it is given to
        patched.setattr(preflight.tempfile, "TemporaryFile", lambda **_: full)  # as a quota shows
        assert "No space left" in disk_problem(paths)
    shutil.rmtree(paths.root)
    assert "No such file or directory" in disk_problem(paths)


def test_continuing_without_a_ledger_prints_a_warning(tmp_path):
    paths = RunPaths(tmp_path)
    assert earlier_run(paths, None, has_rollouts=True) == ""
    newest = paths.recover / "step-000006"
    told = earlier_run(paths, newest, has_rollouts=True)
    assert "trainers from step-000006, if it is intact\nareal: warning:" in told
    assert "warning" not in earlier_run(paths, newest, has_rollouts=False)
    paths.ledger.mkdir()
    (paths.ledger / "events-000001.jsonl").touch()
    assert "warning" not in earlier_run(paths, newest, has_rollouts=True)


def test_overwriting_deletes_a_run_and_nothing_else(tmp_path):
    paths = RunPaths(tmp_path / "run")
    make_run_folder(paths)
    preflight.overwrite_run(paths)  # an empty folder
    (paths.root / "data.jsonl").write_text("{}")
    with raises_code("launch.not_a_run"):
        preflight.overwrite_run(paths)
    assert (paths.root / "data.jsonl").exists()
    (tmp_path / "elsewhere").mkdir()
    (paths.root / "link").symlink_to(tmp_path / "elsewhere")
    paths.config.write_text("{}")
    (paths.ledger / "deep").mkdir(parents=True)
    with run_lock(paths):
        preflight.overwrite_run(paths)
        assert list(paths.root.iterdir()) == [paths.lock]
    assert (tmp_path / "elsewhere").is_dir()
