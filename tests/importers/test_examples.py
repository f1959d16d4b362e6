"""Configurations of other systems, rebuilt from their documented keys: every key is classified, and each can start."""

import json
import shutil
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
import yaml
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal.api.config.load import load_experiment
from areal.data.tiny_model import character_tokenizer, tiny_model
from areal.engine import build
from areal.importers.verl_algorithm import NO_EVALUATION
from areal.launcher import local, preflight
from areal.launcher.local import checked_plan, read_command_line
from areal.launcher.placement import Machine
from areal.launcher.status import StatusLine
from areal.models import mesh_rules
from areal.system.network import Host
from tests.importers.conftest import Imported
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
    talks = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in turns
    ]
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


def of_example(path: Path, files: dict[str, str], imported, folder: Path) -> tuple[Path, Imported]:
    """The translated file and its report."""
    text = path.read_text()
    if path.name.startswith("verl"):  # whose prompts are lists of messages
        text = text.replace("DATA", str(Path(files["DATA"]).with_name("chats.jsonl")))
    for word, value in files.items():
        text = text.replace(word, value)
    output = folder / "ours.yaml"
    return output, imported(path.name.partition("_")[0], text, "-o", str(output), name=path.name)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_key_is_classified_and_the_result_can_start(path, files, imported, tmp_path, monkeypatch):
    output, result = of_example(path, files, imported, tmp_path)
    for entry in result.report["keys"]:
        assert entry["fate"] in ("kept", "computed", "server", "dropped", "missing")
        assert entry["text"] not in ("", "no counterpart is known")
        assert entry["fate"] != "kept" or set(entry["text"].split(", ")) <= result.values.keys()
    assert all(option["origin"] for option in result.report["options"].values())
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
    result = []
    for key, value in tree.items():
        path = f"{prefix}{key}"
        result += leaf_keys(value, f"{path}.") if isinstance(value, dict) and value else [path]
    return result


TREES = [path for path in EXAMPLES if path.suffix != ".sh"]  # words of a script are keys of a tree


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.stem)
def test_every_leaf_key_is_in_the_report_exactly_once(path, imported):
    """Also keys that nobody knows, and keys of every kind of value."""
    text = path.read_text()
    tree = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    added: dict[str, object] = {}
    changed = with_unknown_keys(tree, Random(path.stem), added)
    result = imported(path.name.partition("_")[0], yaml.safe_dump(changed, sort_keys=False))
    assert sorted(entry["key"] for entry in result.report["keys"]) == sorted(leaf_keys(changed))
    kept = {key for key, fate in result.fates.items() if "unknown_" in key and fate == "kept"}
    assert {key.partition(".")[0] for key in kept} <= {"sglang", "vllm"}  # flags under the same names
    top = [key for key in leaf_keys(changed) if key.startswith("unknown_")]
    with_value = [key for key in top if added[key.partition(".")[0]] not in (None, {}) and not key.endswith(".z")]
    assert {result.fates[key] for key in with_value} <= {"missing"}
    reasons = {text for key, text in result.of_keys("text").items() if "unknown_" in key}
    assert not {reason for reason in reasons & IS_OFF.keys() if IS_OFF[reason] in result.values}


WITH_REWARDS = [path for path in EXAMPLES if not {"agent", "sft"} & set(path.stem.split("_"))]


@pytest.mark.slow  # each starts a process
@pytest.mark.parametrize("path", WITH_REWARDS, ids=lambda path: path.stem)
def test_the_reward_of_each_can_be_called_on_row_0(path, files, imported, tmp_path, monkeypatch):
    output, _ = of_example(path, files, imported, tmp_path)
    assert dry_run(output, monkeypatch, tries_row=True).num_servers >= 1


def dry_run(path: Path, monkeypatch, tries_row: bool):
    monkeypatch.setattr(
        local, "server_problems", lambda *inputs: []
    )  # SGLang, vLLM and Megatron-Core are not installed
    monkeypatch.setattr(mesh_rules, "package_problem", lambda *passed: None)
    request = read_command_line(["--config", str(path), "--dry-run"], launcher="ray")
    cluster = request.config.cluster
    gpus = tuple(map(str, range(cluster.n_gpus_per_node)))
    machines = [Machine(cores=64, gpus=gpus, host=Host(node=f"n{n}")) for n in range(cluster.n_nodes)]
    monkeypatch.setattr(local, "nccl_versions", lambda config: None)
    monkeypatch.setattr(preflight, "_package_problems", lambda *args, asks: [])  # a process: test_tracker_check.py
    if not tries_row:  # it starts a process
        monkeypatch.setattr(local, "tried_row", lambda config: local.TriedRow())
        # a process, which tests/models/test_packed_families.py starts
        monkeypatch.setattr(preflight, "_answer_about", lambda config, *args: json.dumps(build.refused_models(config)))
    monkeypatch.setattr(local, "reward_notice", lambda config: "")  # another process
    return checked_plan(request, machines, StatusLine())


OF_EXAMPLES = {
    "verl_dapo": (  # sizes become numbers, and flags go to the servers
        {"actor.ppo_n_minibatches": 512 // 32, "actor.optimizer.warmup_steps_proportion": pytest.approx(10 / 300),
         "allocation_mode": "sglang:d2t4+fsdp:d2c4", "sglang.mem_fraction_static": 0.8,
         "gconfig.max_tokens": 2048 + 20480, "actor.eps_clip": 0.2, "actor.eps_clip_higher": 0.28,
         "actor.c_clip": 10.0, "rollout.should_accept_fn": "mixed_rewards", "evaluator.modes": ["sampled"],
         "evaluator.n_samples": 4},
        {"actor_rollout_ref.rollout.gpu_memory_utilization": "server",
         "actor_rollout_ref.model.override_config.max_position_embeddings": "missing"},
    ),
    "roll_fsdp_async": (  # separate devices stay separate
        {"allocation_mode": "sglang:d2t2+fsdp:d2c2", "actor.ppo_n_minibatches": 32 * 8 // (64 * 1 * 2),
         "rollout.max_head_offpolicyness": 1},
        {},
    ),
    "areal_v1_backends": (
        {"allocation_mode": "sglang:d4+fsdp:d4"},
        {"actor.rejection_sampling.upper": "computed", "rollout.dump_to_file": "dropped"},
    ),
    "areal_v1_agent": (
        {"workflow": "agent", "agent.cut": "per_turn", "agent.inline": True, "agent.turn_discount": 0.9,
         "perf_tracer.profile_steps": [3, 4], "actor.fsdp.offload_optimizer": True, "recover.mode": "auto",
         "server_defaults": "areal"},
        {f"rollout.{key}": "dropped" for key in ("_version", "poll_interval", "agent.tool_call_parser")},
    ),
    "areal_v1_distill": (  # the weights of a teacher are those of the loss
        {"teacher.loss_coef": 0.005, "teacher.advantage_coef": 0.0, "vllm.enable_chunked_prefill": True,
         "vllm.enable_prefix_caching": False},
        {"teacher.rl_loss_weight": "kept"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_EXAMPLES)
def test_options_and_fates_of_an_example(name, files, imported, tmp_path):
    values, fates = OF_EXAMPLES[name]
    _, result = of_example(next(path for path in EXAMPLES if path.stem == name), files, imported, tmp_path)
    assert {option: result.values[option] for option in values} == values
    assert {key: result.fates[key] for key in fates} == fates
    assert name != "areal_v1_agent" or "missing" not in result.fates.values()


def test_what_has_no_counterpart_is_missing_and_in_the_file(files, imported, tmp_path):
    path = next(path for path in EXAMPLES if path.stem == "cosmos_lora_fp8")
    output, result = of_example(path, files, imported, tmp_path)
    missing = {key for key, fate in result.fates.items() if fate == "missing"}
    assert result.of_keys("text")["policy.lora.r"] == "actor.lora.rank"
    assert result.of_keys("text")["policy.lora.lora_alpha"] == "actor.lora.alpha"
    assert "policy.parallelism.pp_size" in missing
    assert result.of_keys("text")["rollout.quantization"] == "vllm.quantization"
    assert result.values["actor.fp8.recipe"] == "rowwise"  # cosmos-rl's default
    text = output.read_text()
    assert all(f"# missing: {key}=" in text for key in missing)
    for line in text.splitlines():
        _, colon, rest = line.partition(":")
        assert line.startswith("#") or (colon and (not rest.strip() or "  # " in rest)), line
    assert yaml.safe_load(text)["train_dataset"]["batch_size"] == 2


@dataclass
class Case:
    system: str
    text: str
    values: dict[str, object]
    words: list[str] = field(default_factory=list)
    name: str = "f.yaml"
    is_missing: tuple[str, ...] | None = None  # all keys without a counterpart; not compared where None


CASES = {
    "an absent recover.mode is AReaL's default, and ranges of steps are lists": Case(
        "areal",
        "perf_tracer: {profile_steps: [0, 2]}\nmemory_profiler: {profile_steps: [2, 5]}\nactor: {path: m}\n",
        {"recover.mode": "disabled", "perf_tracer.profile_steps": [1, 3, 6], "total_train_epochs": None}),
    "a limit of steps does not repeat the data of AReaL": Case(
        "areal", "total_train_steps: 90\nactor: {path: m}\n", {"total_train_epochs": 1}),
    "a limit of steps beside epochs": Case(
        "areal", "total_train_epochs: 3\ntotal_train_steps: 90\nactor: {path: m}\n", {"total_train_epochs": 3}),
    "the agent of older files is their workflow": Case(
        "areal",
        "workflow: my.agents.Math\nactor: {path: m}\ntrain_dataset: {path: d}\n"
        "rollout: {openai: {mode: subproc, export_style: concat, tool_call_parser: qwen25}}\n",
        {"workflow": "agent", "workflow_args.agent": "my.agents:Math", "agent.cut": "concat", "agent.inline": False},
        is_missing=()),
    "limits of rows and options of the template": Case(
        "verl",
        "data: {train_files: a.parquet, val_files: b.parquet, train_max_samples: 100, val_max_samples: 20,\n"
        "  validation_shuffle: true, apply_chat_template_kwargs: {enable_thinking: false, other: 1}}\n"
        "actor_rollout_ref: {model: {path: m}}\n",
        {"train_dataset.max_rows": 100, "valid_dataset.max_rows": 20, "valid_dataset.shuffle": True,
         "chat_template.args.enable_thinking": False, "chat_template.args.other": 1},
        is_missing=()),
    "variables of a script, and numbers like 1e-6": Case(
        "verl",
        "size=32\nMODEL=org/m\npython3 -m verl \\\n data.train_batch_size=${size} \\\n"
        " actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.optim.lr=1e-6 data.train_files=a.parquet $@\n",
        {"train_dataset.batch_size": 32, "actor.path": "org/m", "actor.optimizer.lr": 1e-6}, name="run.sh"),
    "defaults, arithmetic and lists of words in a script": Case(
        "verl",
        "set -x\nENGINE=${1:-sglang}\nlength=$((1024 * 2))\nDATA=(\n  data.train_files=$HOME/a.parquet\n"
        "  data.max_prompt_length=${length} data.max_response_length=$((length * (1 + 1)))\n)\n"
        'python3 -m verl "${DATA[@]}" actor_rollout_ref.rollout.name=$ENGINE actor_rollout_ref.model.path=${MODEL} $@',
        {"train_dataset.path": "/home/u/a.parquet", "actor.path": None, "train_dataset.max_length": 2048,
         "gconfig.max_new_tokens": 4096, "allocation_mode": "sglang:d2t2+fsdp:d4"}, name="run.sh"),
    "adapters of ROLL": Case(
        "roll",
        "pretrain: m\nactor_train: {model_args: {lora_rank: 8, lora_alpha: 16, lora_target: 'a, b'}}\n",
        {"actor.lora.rank": 8, "actor.lora.alpha": 16, "actor.lora.target_modules": ["a", "b"]}),
    "columns of Cosmos": Case(
        "cosmos",
        "[train.train_policy]\ntype = 'grpo'\nprompt_column_name = 'question'\nresponse_column_name = 'answer'\n",
        {"train_dataset.columns": {"question": "prompt"}}, name="f.toml", is_missing=()),
    "dates and lists of TOML": Case(
        "cosmos",
        "[train]\ntimestamp = 2025-01-01\nepoch = 2\n[train.train_policy]\nreward_function = [['boxed_math']]\n",
        {}, name="f.toml", is_missing=("train.train_policy.reward_function",)),
    "FP8 of Cosmos": Case(
        "cosmos",
        "[train.fp8]\nenable_fp8 = true\nquant_recipe = 'tensorwise'\n[train.fp4]\nenable_fp4 = false\n"
        "quant_recipe = 'rowwise'\n[train.train_policy]\ntype = 'grpo'\n",
        {"actor.fp8.recipe": "tensorwise"}, name="f.toml", is_missing=()),
    "delayed scaling and FP4 of Cosmos": Case(
        "cosmos",
        "[train.fp8]\nenable_fp8 = true\nfp8_recipe = 'delayed_scaling'\n[train.fp4]\nenable_fp4 = true\n"
        "[train.train_policy]\ntype = 'grpo'\n[rollout]\nn_generation = 4\n",
        {"actor.fp8.recipe": None}, name="f.toml",
        is_missing=("train.fp8.enable_fp8", "train.fp8.fp8_recipe", "train.fp4.enable_fp4")),
    "4-bit servers of Cosmos": Case(
        "cosmos",
        "[rollout]\nbackend = 'vllm'\nquantization = 'mxfp4'\n[train.train_policy]\ntype = 'grpo'\n",
        {"vllm.quantization": "mxfp4"}, name="f.toml", is_missing=()),
    "FP8 of verl": Case(
        "verl",
        "actor_rollout_ref: {model: {path: m}, actor: {strategy: megatron, optim: {override_optimizer_config:\n"
        "  {fp8_recipe: blockwise}}, megatron: {override_transformer_config: {fp8: hybrid, fp8_recipe: blockwise,\n"
        "  fp8_param: true}}}}\n",
        {"actor.megatron.fp8": "hybrid", "actor.megatron.fp8_recipe": "blockwise",
         "actor.megatron.ddp.fp8_param_gather": True}, is_missing=()),
    "FP8 of verl that is off": Case(
        "verl",
        "actor_rollout_ref: {model: {path: m}, actor: {strategy: megatron, megatron: {override_transformer_config:\n"
        "  {fp8: false, fp8_recipe: blockwise}}}}\n",
        {"actor.megatron.fp8": None, "actor.megatron.fp8_recipe": None}, is_missing=()),
    "FP8 of ROLL": Case(
        "roll",
        "pretrain: m\nactor_train: {strategy_args: {strategy_name: megatron_train, strategy_config: {fp8: e4m3,\n"
        "  fp8_recipe: mxfp8}}}\n",
        {"actor.megatron.fp8": "e4m3", "actor.megatron.fp8_recipe": "mxfp8"}, is_missing=()),
    "FP8 of AReaL, of which some options are missing": Case(
        "areal",
        "actor: {path: m, megatron: {fp8_config: {recipe: tensorwise, param: true, amax_history_len: 1, margin: 0,\n"
        "  dot_product_attention: true}}, archon: {fp8_config: {mode: blockwise}}}\n"
        "critic: {path: m, archon: {fp8_config: {mode: disabled}}}\n",
        {"actor.megatron.fp8": "e4m3", "actor.megatron.fp8_recipe": "tensorwise",
         "actor.megatron.ddp.fp8_param_gather": True},
        is_missing=("actor.megatron.fp8_config.dot_product_attention", "actor.archon.fp8_config.mode", "reward_fn")),
    "numbers and dates are read as the other system reads them": Case(
        "verl",
        "trainer: {experiment_name: 2026-01-31}\nactor_rollout_ref: {actor: {optim: {lr: 1e-6}}}\n",
        {"trial_name": "2026-01-31", "experiment_name": "2026-02-01", "actor.optimizer.lr": 1e-6},
        words=["trainer.project_name=2026-02-01"]),
    "a key whose interpolation has no value is missing, and the others are imported": Case(
        "roll",
        "pretrain: m\nreference: {strategy_args: {strategy_config: '${deepspeed_zero3}'}}\nseed: ${exp}\n",
        {"actor.path": "m"}, is_missing=("reference.strategy_args.strategy_config", "seed")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_options_of(name, imported, monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    case = CASES[name]
    result = imported(case.system, case.text, *case.words, name=case.name)
    assert {option: result.values.get(option) for option in case.values} == case.values
    missing = [key for key, fate in result.fates.items() if fate == "missing"]
    assert case.is_missing is None or sorted(missing) == sorted(case.is_missing)
    assert "recover.mode" not in case.values or "AReaL" in result.report["options"]["recover.mode"]["origin"]


@pytest.mark.parametrize(
    ("kind", "section", "more"),
    [("sft", "model", ""), ("dpo", "actor", "ref: {path: m, backend: 'fsdp:d1'}\nbeta: 0.2\nloss_type: ipo\n")],
)
def test_supervised_files_of_areal_1_get_the_sections_of_v05(imported, tmp_path, kind, section, more):
    text = "experiment_name: e\ntrial_name: t\nactor: {backend: 'fsdp:d1', path: m, optimizer: {lr: 1.0e-5}}\n"
    output = str(tmp_path / "ours.yaml")
    imported("areal", f"{text}{more}train_dataset: {{path: d.jsonl, type: {kind}, batch_size: 2}}\n", "-o", output)
    config = load_experiment(["--config", output])
    assert (config.models[section].path, config.allocation_mode) == ("m", "fsdp:d1")
    assert kind == "sft" or (config.dpo.beta, config.dpo.loss_type) == (0.2, "ipo")


def test_an_override_is_in_the_words_of_the_other_system(imported, tmp_path):
    text = "data: {train_files: a.parquet}\nactor_rollout_ref: {model: {path: m}}\n"
    names = ["trainer.project_name=p", "trainer.experiment_name=e"]
    output = str(tmp_path / "ours.yaml")
    imported("verl", text, "+data.train_batch_size=64", "-o", output, *names)
    assert load_experiment(["--config", output]).train_dataset.batch_size == 64


def test_the_files_of_hydra_defaults_are_composed(imported, tmp_path):
    files = {
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
    main = (
        "defaults:\n- base\n- actor@actor_rollout_ref.actor: dp\n- critic: none_there\n- _self_\n"
        "- override hydra/job_logging: none\ndata: {train_batch_size: 64}\n"
    )
    result = imported("verl", main, name="config/main.yaml")
    assert result.values | {
        "train_dataset.batch_size": 64, "train_dataset.path": "a.parquet", "total_train_epochs": 2,
        "actor.path": "org/m", "actor.eps_clip": 0.3, "actor.optimizer.lr": 1e-6,
    } == result.values  # fmt: skip
    assert [key for key in result.fates if key.startswith("defaults")] == ["defaults.critic"]


def test_one_override_changes_every_option_that_refers_to_it(files, imported, tmp_path):
    source = next(path for path in EXAMPLES if path.name == "areal_v05_grpo.yaml")
    output, _ = of_example(source, files, imported, tmp_path)
    config = load_experiment(["--config", str(output), "train_dataset.batch_size=64", "gconfig.n_samples=2"])
    assert (config.rollout.consumer_batch_size, config.actor.group_size) == (64, 2)
    assert config.tokenizer_path == config.actor.path == files["MODEL"]
