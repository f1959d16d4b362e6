"""Configurations of other systems, rebuilt from their documented keys: every key is classified, and each can start."""

import json
import shutil
import tomllib
from pathlib import Path
from random import Random

import pytest
import yaml
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal.api.config.load import load_experiment
from areal.cli.main import run_command
from areal.data.tiny_model import character_tokenizer, tiny_model
from areal.importers.verl_algorithm import NO_EVALUATION
from areal.launcher import local
from areal.launcher.local import checked_plan, read_command_line
from areal.launcher.placement import Machine
from areal.launcher.status import StatusLine
from areal.models import mesh_rules
from areal.system.network import Host
from tests.megatron.expert_model import SIZES

EXAMPLES = sorted((Path(__file__).parent / "examples").iterdir())


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """The words in the examples that stand for paths."""
    folder = tmp_path_factory.mktemp("imported")
    tokenizer = character_tokenizer(
        ["<pad>", "<eos>", "<unk>", *"0123456789+="],
        context_length=65536,
        chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )
    tokenizer.save_pretrained(folder / "model")
    tiny_model(tokenizer, 1, num_heads=8, vocab_size=64).save_pretrained(folder / "model")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "data_source": "sum"} for n in range(2000)]
    of_roll = [row | {"tag": "aime", "ground_truth": row["answer"], "instruction": row["prompt"]} for row in rows]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_roll))
    (folder / "chats.jsonl").write_text("".join(json.dumps(verl_row(row)) + "\n" for row in rows))
    turns = [(f"{n}+1=", str(n + 1)) for n in range(64)]
    talks = [[{"role": "user", "content": one}, {"role": "assistant", "content": two}] for one, two in turns]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"talk": talk}) + "\n" for talk in talks))
    (folder / "reward.py").write_text(
        "def score(prompt, completion, prompt_ids, completion_ids, **row):\n    return 1.0\n"
    )
    shutil.copytree(folder / "model", folder / "experts")
    sizes = SIZES | {"num_key_value_heads": 4, "vocab_size": 64, "max_position_embeddings": 65536}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder / "experts")
    paths = {"MODEL": "model", "EXPERTS": "experts", "DATA": "rows.jsonl", "TALKS": "talks.jsonl"}
    paths |= {"REWARD": "reward.py", "ROOT": "runs"}
    return {word: str(folder / name) for word, name in paths.items()}


def verl_row(row: dict) -> dict:
    """A row with the columns that verl's preprocessing scripts write."""
    return {
        "data_source": row["data_source"],
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        "extra_info": {"split": "train", "index": 0},
    }


def imported(path: Path, files: dict[str, str], folder: Path, capsys) -> tuple[Path, dict]:
    """The translated file and its report."""
    text = path.read_text()
    if path.name.startswith("verl"):  # whose prompts are lists of messages
        text = text.replace("DATA", str(Path(files["DATA"]).with_name("chats.jsonl")))
    for word, value in files.items():
        text = text.replace(word, value)
    source, output = folder / path.name, folder / "ours.yaml"
    source.write_text(text)
    system = path.name.partition("_")[0]
    assert run_command(["config", "import", system, str(source), "-o", str(output), "--json"]) == 0
    return output, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_key_is_classified_and_the_result_can_start(path, files, tmp_path, capsys, monkeypatch):
    output, report = imported(path, files, tmp_path, capsys)
    for entry in report["keys"]:
        assert entry["fate"] in ("kept", "computed", "server", "dropped", "missing")
        assert entry["text"]
        if entry["fate"] == "kept":
            assert all(option in report["options"] for option in entry["text"].split(", "))
    assert all(option["origin"] for option in report["options"].values())
    assert not [entry["key"] for entry in report["keys"] if entry["text"] == "no counterpart is known"]
    assert bool(dry_run(output, monkeypatch, tries_row=False).num_servers) == ("sft" not in path.stem)


IS_OFF = {
    "there is no critic": "critic.path",
    "there is no reference": "ref.path",
    "there is no penalty for long answers": "actor.overlong_reward_penalty",
    NO_EVALUATION: "valid_dataset.path",
    "there is no evaluation": "valid_dataset.path",
}
"""Reason for which a whole section is dropped -> an option that contradicts it."""


def with_unknown_keys(tree: dict, random: Random, added: dict[str, object], prefix: str = "") -> dict:
    """The tree with keys of no meaning in some of its sections, of every type of value; their paths are `added`."""
    tree = {
        key: with_unknown_keys(value, random, added, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in tree.items()
    }
    values = [1, 2.5, "text", True, [1, {"a": 2}], {"x": 1, "y": {"z": None}}, None, {}]
    for number in range(random.randrange(3)):
        name = f"unknown_{random.randrange(10**9)}_{number}"
        tree[name] = added[f"{prefix}{name}"] = random.choice(values)
    return tree


def leaf_keys(tree: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        found += leaf_keys(value, f"{path}.") if isinstance(value, dict) and value else [path]
    return found


TREES = [path for path in EXAMPLES if path.suffix != ".sh"]  # words of a script are keys of a tree


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.stem)
def test_every_leaf_key_is_in_the_report_exactly_once(path, tmp_path, capsys):
    """Also keys that nobody knows, and keys of every kind of value."""
    text = path.read_text()
    tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    system = path.name.partition("_")[0]
    for seed in range(3):
        added: dict[str, object] = {}
        changed = with_unknown_keys(tree, Random(seed), added)
        source = tmp_path / "c.yaml"
        source.write_text(yaml.safe_dump(changed, sort_keys=False))
        assert run_command(["config", "import", system, str(source), "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert sorted(entry["key"] for entry in report["keys"]) == sorted(leaf_keys(changed))
        fates = {entry["key"]: entry["fate"] for entry in report["keys"]}
        kept = {key for key, fate in fates.items() if "unknown_" in key and fate == "kept"}
        assert {key.partition(".")[0] for key in kept} <= {"sglang", "vllm"}  # flags under the same names
        top = [key for key in leaf_keys(changed) if key.startswith("unknown_")]
        with_value = [key for key in top if added[key.partition(".")[0]] not in (None, {}) and not key.endswith(".z")]
        assert {fates[key] for key in with_value} <= {"missing"}
        reasons = {entry["text"] for entry in report["keys"] if "unknown_" in entry["key"]}
        assert {reason for reason in reasons & IS_OFF.keys() if IS_OFF[reason] in report["options"]} == set()


WITH_REWARDS = [path for path in EXAMPLES if not {"agent", "sft"} & set(path.stem.split("_"))]


@pytest.mark.slow  # each starts a process
@pytest.mark.parametrize("path", WITH_REWARDS, ids=lambda path: path.stem)
def test_the_reward_of_each_can_be_called_on_row_0(path, files, tmp_path, capsys, monkeypatch):
    output, _ = imported(path, files, tmp_path, capsys)
    assert dry_run(output, monkeypatch, tries_row=True).num_servers >= 1


def dry_run(path: Path, monkeypatch, tries_row: bool):
    monkeypatch.setattr(local, "server_problems", lambda *given: [])  # SGLang, vLLM and Megatron-Core are not installed
    monkeypatch.setattr(mesh_rules, "package_problem", lambda *given: None)
    request = read_command_line(["--config", str(path), "--dry-run"], launcher="ray")
    cluster = request.config.cluster
    gpus = tuple(map(str, range(cluster.n_gpus_per_node)))
    machines = [Machine(cores=64, gpus=gpus, host=Host(node=f"n{n}")) for n in range(cluster.n_nodes)]
    monkeypatch.setattr(local, "_nccl_of", lambda *given: None)
    return checked_plan(request, machines, StatusLine(), tries_row=tries_row)


def options_of(name: str, files, tmp_path, capsys) -> tuple[dict, dict]:
    path = next(path for path in EXAMPLES if path.stem == name)
    _, report = imported(path, files, tmp_path, capsys)
    return {path: option["value"] for path, option in report["options"].items()}, {
        entry["key"]: entry["fate"] for entry in report["keys"]
    }


def test_sizes_become_numbers_and_flags_go_to_the_servers(files, tmp_path, capsys):
    options, fates = options_of("verl_dapo", files, tmp_path, capsys)
    assert options["actor.ppo_n_minibatches"] == 512 // 32
    assert options["actor.optimizer.warmup_steps_proportion"] == pytest.approx(10 / 300)
    assert options["allocation_mode"] == "sglang:d2t4+fsdp:d2c4"
    assert options["sglang.mem_fraction_static"] == 0.8
    assert options["gconfig.max_tokens"] == 2048 + 20480
    assert (options["actor.eps_clip"], options["actor.eps_clip_higher"], options["actor.c_clip"]) == (0.2, 0.28, 10.0)
    assert options["rollout.should_accept_fn"] == "mixed_rewards"
    assert (options["evaluator.modes"], options["evaluator.n_samples"]) == (["sampled"], 4)
    assert fates["actor_rollout_ref.rollout.gpu_memory_utilization"] == "server"
    assert fates["actor_rollout_ref.model.override_config.max_position_embeddings"] == "missing"


def test_what_has_no_counterpart_is_missing_and_in_the_file(files, tmp_path, capsys):
    path = next(path for path in EXAMPLES if path.stem == "cosmos_lora_fp8")
    output, report = imported(path, files, tmp_path, capsys)
    missing = {entry["key"] for entry in report["keys"] if entry["fate"] == "missing"}
    kept = {entry["key"]: entry["text"] for entry in report["keys"] if entry["fate"] == "kept"}
    assert kept["policy.lora.r"] == "actor.lora.rank"
    assert kept["policy.lora.lora_alpha"] == "actor.lora.alpha"
    assert {"policy.parallelism.pp_size", "train.fp8.enable_fp8", "rollout.quantization"} <= missing
    text = output.read_text()
    assert all(f"# missing: {key}=" in text for key in missing)
    for line in text.splitlines():
        _, colon, rest = line.partition(":")
        assert line.startswith("#") or (colon and (not rest.strip() or "  # " in rest)), line
    assert yaml.safe_load(text)["train_dataset"]["batch_size"] == 2


def test_separate_devices_stay_separate(files, tmp_path, capsys):
    options, _ = options_of("roll_fsdp_async", files, tmp_path, capsys)
    assert options["allocation_mode"] == "sglang:d2t2+fsdp:d2c2"
    assert options["actor.ppo_n_minibatches"] == 32 * 8 // (64 * 1 * 2)
    assert options["rollout.max_head_offpolicyness"] == 1


def test_a_file_of_areal_1_gets_the_backends_of_its_roles(files, tmp_path, capsys):
    options, fates = options_of("areal_v1_backends", files, tmp_path, capsys)
    assert options["allocation_mode"] == "sglang:d4+fsdp:d4"
    assert fates["actor.rejection_sampling.upper"] == "computed"
    assert fates["rollout.dump_to_file"] == "dropped"


def test_an_agent_of_areal_1_becomes_the_workflow_agent(files, tmp_path, capsys):
    options, fates = options_of("areal_v1_agent", files, tmp_path, capsys)
    assert (options["workflow"], options["agent.cut"], options["agent.inline"]) == ("agent", "per_turn", True)
    assert (options["agent.turn_discount"], options["perf_tracer.profile_steps"]) == (0.9, [3, 4])
    assert options["actor.fsdp.offload_optimizer"] is True
    assert options["recover.mode"] == "auto"
    assert options["server_defaults"] == "areal"
    assert {fates[f"rollout.{key}"] for key in ("_version", "poll_interval", "agent.tool_call_parser")} == {"dropped"}
    assert "missing" not in fates.values()


def test_an_absent_recover_mode_is_areals_default(tmp_path, capsys):
    source = tmp_path / "c.yaml"
    source.write_text(
        "perf_tracer: {profile_steps: [0, 2]}\nmemory_profiler: {profile_steps: [2, 5]}\nactor: {path: m}\n"
    )
    assert run_command(["config", "import", "areal", str(source), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["options"]["recover.mode"]["value"] == "disabled"
    assert "AReaL" in report["options"]["recover.mode"]["origin"]
    assert report["options"]["perf_tracer.profile_steps"]["value"] == [1, 3, 6]
    assert "total_train_epochs" not in report["options"]


@pytest.mark.parametrize(("lines", "expected"), [("", 1), ("total_train_epochs: 3\n", 3)])
def test_a_limit_of_steps_does_not_repeat_the_data_of_areal(tmp_path, capsys, lines, expected):
    source = tmp_path / "c.yaml"
    source.write_text(f"{lines}total_train_steps: 90\nactor: {{path: m}}\n")
    assert run_command(["config", "import", "areal", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["options"]["total_train_epochs"]["value"] == expected


def test_the_agent_of_older_files_is_their_workflow(tmp_path, capsys):
    source = tmp_path / "c.yaml"
    source.write_text(
        "workflow: my.agents.Math\nrollout: {openai: {mode: subproc, export_style: concat, tool_call_parser: qwen25}}\n"
        "actor: {path: m}\ntrain_dataset: {path: d}\n"
    )
    assert run_command(["config", "import", "areal", str(source), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    values = {path: option["value"] for path, option in report["options"].items()}
    assert (values["workflow"], values["workflow_args.agent"]) == ("agent", "my.agents:Math")
    assert (values["agent.cut"], values["agent.inline"]) == ("concat", False)
    assert "missing" not in {entry["fate"] for entry in report["keys"]}


def test_the_weights_of_a_teacher_of_areal_1_are_those_of_the_loss(files, tmp_path, capsys):
    options, fates = options_of("areal_v1_distill", files, tmp_path, capsys)
    assert (options["teacher.loss_coef"], options["teacher.advantage_coef"]) == (0.005, 0.0)
    assert (options["vllm.enable_chunked_prefill"], options["vllm.enable_prefix_caching"]) == (True, False)
    assert fates["teacher.rl_loss_weight"] == "kept"


def test_supervised_files_of_areal_1_get_the_sections_of_v05(files, tmp_path, capsys):
    source, output = tmp_path / "c.yaml", tmp_path / "ours.yaml"
    text = "experiment_name: e\ntrial_name: t\nactor: {backend: 'fsdp:d1', path: m, optimizer: {lr: 1.0e-5}}\n"
    for kind, section in (("sft", "model"), ("dpo", "actor")):
        more = "ref: {path: m, backend: 'fsdp:d1'}\nbeta: 0.2\nloss_type: ipo\n" if kind == "dpo" else ""
        source.write_text(f"{text}{more}train_dataset: {{path: d.jsonl, type: {kind}, batch_size: 2}}\n")
        assert run_command(["config", "import", "areal", str(source), "-o", str(output), "--overwrite"]) == 0
        config = load_experiment(["--config", str(output)])
        assert config.models[section].path == "m"
        assert config.allocation_mode == "fsdp:d1"
    assert (config.dpo.beta, config.dpo.loss_type) == (0.2, "ipo")


def test_an_override_is_in_the_words_of_the_other_system(files, tmp_path, capsys):
    source = tmp_path / "c.yaml"
    source.write_text("data: {train_files: a.parquet}\nactor_rollout_ref: {model: {path: m}}\n")
    output = tmp_path / "ours.yaml"
    words = ["config", "import", "verl", str(source), "+data.train_batch_size=64", "-o", str(output)]
    assert run_command([*words, "trainer.project_name=p", "trainer.experiment_name=e"]) == 0
    assert load_experiment(["--config", str(output)]).train_dataset.batch_size == 64


def test_limits_of_rows_and_options_of_the_template_are_kept(tmp_path, capsys):
    source = tmp_path / "c.yaml"
    source.write_text(
        "data: {train_files: a.parquet, val_files: b.parquet, train_max_samples: 100, val_max_samples: 20,\n"
        "  validation_shuffle: true, apply_chat_template_kwargs: {enable_thinking: false, other: 1}}\n"
        "actor_rollout_ref: {model: {path: m}}\n"
    )
    assert run_command(["config", "import", "verl", str(source), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    values = {path: option["value"] for path, option in report["options"].items()}
    assert (values["train_dataset.max_rows"], values["valid_dataset.max_rows"]) == (100, 20)
    assert (values["valid_dataset.shuffle"], values["chat_template.args.enable_thinking"]) == (True, False)
    assert values["chat_template.args.other"] == 1
    assert "missing" not in {entry["fate"] for entry in report["keys"]}


def test_a_script_gives_its_variables_and_numbers_like_1e_6(tmp_path, capsys):
    script = tmp_path / "run.sh"
    script.write_text(
        "size=32\nMODEL=org/m\npython3 -m verl \\\n data.train_batch_size=${size} \\\n"
        " actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.optim.lr=1e-6 data.train_files=a.parquet $@\n"
    )
    assert run_command(["config", "import", "verl", str(script), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["options"]
    values = [found[name]["value"] for name in ("train_dataset.batch_size", "actor.path", "actor.optimizer.lr")]
    assert values == [32, "org/m", 1e-6]


def test_a_script_may_have_defaults_arithmetic_and_lists_of_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    script = tmp_path / "run.sh"
    script.write_text(
        "set -x\nENGINE=${1:-sglang}\nlength=$((1024 * 2))\nDATA=(\n  data.train_files=$HOME/a.parquet\n"
        "  data.max_prompt_length=${length} data.max_response_length=$((length * (1 + 1)))\n)\n"
        'python3 -m verl "${DATA[@]}" actor_rollout_ref.rollout.name=$ENGINE actor_rollout_ref.model.path=${MODEL} $@\n'
    )
    assert run_command(["config", "import", "verl", str(script), "--json"]) == 0
    found = {path: one["value"] for path, one in json.loads(capsys.readouterr().out)["options"].items()}
    assert (found["train_dataset.path"], found.get("actor.path")) == ("/home/u/a.parquet", None)
    assert (found["train_dataset.max_length"], found["gconfig.max_new_tokens"]) == (2048, 4096)
    assert found["allocation_mode"].startswith("sglang:")


def test_adapters_of_roll_and_columns_of_cosmos_are_kept(tmp_path, capsys):
    source = tmp_path / "c.yaml"
    source.write_text("pretrain: m\nactor_train: {model_args: {lora_rank: 8, lora_alpha: 16, lora_target: 'a, b'}}\n")
    assert run_command(["config", "import", "roll", str(source), "--json"]) == 0
    found = {path: one["value"] for path, one in json.loads(capsys.readouterr().out)["options"].items()}
    assert [found[f"actor.lora.{name}"] for name in ("rank", "alpha", "target_modules")] == [8, 16, ["a", "b"]]
    source = tmp_path / "c.toml"
    source.write_text(
        "[train.train_policy]\ntype = 'grpo'\nprompt_column_name = 'question'\nresponse_column_name = 'answer'\n"
    )
    assert run_command(["config", "import", "cosmos", str(source), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["options"]["train_dataset.columns"]["value"] == {"question": "prompt"}
    assert {entry["fate"] for entry in report["keys"]} == {"computed", "dropped"}


def test_the_files_of_hydra_defaults_are_composed(tmp_path, capsys):
    files = {
        "main.yaml": "defaults:\n- base\n- actor@actor_rollout_ref.actor: dp\n- critic: none_there\n- _self_\n"
        "- override hydra/job_logging: none\ndata: {train_batch_size: 64}\n",
        "base.yaml": "defaults: [../shared/model@actor_rollout_ref.model]\n"
        "data: {train_files: a.parquet, train_batch_size: 8}\ntrainer: {total_epochs: 2}\n",
        "actor/dp.yaml": "defaults: [optim]\nclip_ratio: 0.3\n",
        "actor/optim.yaml": "optim: {lr: 1.0e-6}\n",
        "../shared/model.yaml": "path: org/m\n",
    }
    for name, text in files.items():
        path = tmp_path / "config" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert run_command(["config", "import", "verl", str(tmp_path / "config/main.yaml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    values = {path: option["value"] for path, option in report["options"].items()}
    assert values["train_dataset.batch_size"] == 64
    assert (values["train_dataset.path"], values["total_train_epochs"], values["actor.path"]) == (
        "a.parquet",
        2,
        "org/m",
    )
    assert (values["actor.eps_clip"], values["actor.optimizer.lr"]) == (0.3, 1e-6)
    lost = [entry["key"] for entry in report["keys"] if entry["key"].startswith("defaults")]
    assert lost == ["defaults.critic"]


def test_one_override_changes_every_option_that_refers_to_it(files, tmp_path, capsys):
    source = next(path for path in EXAMPLES if path.name == "areal_v05_grpo.yaml")
    output, _ = imported(source, files, tmp_path, capsys)
    config = load_experiment(["--config", str(output), "train_dataset.batch_size=64", "gconfig.n_samples=2"])
    assert (config.rollout.consumer_batch_size, config.actor.group_size) == (64, 2)
    assert config.tokenizer_path == config.actor.path == files["MODEL"]
