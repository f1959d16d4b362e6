import dataclasses
import json
import logging

import pytest

from areal.api.config import (
    ClusterSpecConfig,
    DPOConfig,
    DPOOptions,
    GenerationHyperparameters,
    GRPOConfig,
    InferenceEngineConfig,
    LauncherConfig,
    NativeServerConfig,
    OptimizerConfig,
    PerfTracerConfig,
    PPOActorConfig,
    RWConfig,
    ScoreModelConfig,
    SFTConfig,
    TrainDatasetConfig,
    TrainEngineConfig,
)
from areal.launcher.job import another_server, make_plan, parse_env_vars, start_again, trained_bytes
from areal.launcher.local import bytes_text, describe, plan_text
from areal.launcher.placement import Machine
from areal.models.model_shape import ModelShape
from areal.system.network import Host
from areal.system.process import ProcessContext
from tests.expect import raises_code


def rl_config(tmp_path, allocation="native:d2+fsdp:d2", **changes):
    settings = {
        "experiment_name": "e",
        "trial_name": "t",
        "allocation_mode": allocation,
        "cluster": ClusterSpecConfig(fileroot=str(tmp_path)),
        "train_dataset": TrainDatasetConfig(path="x", batch_size=8),
        "gconfig": GenerationHyperparameters(n_samples=4),
        "rollout": InferenceEngineConfig(max_head_offpolicyness=3),
        "actor": PPOActorConfig(path="org/model", ppo_n_minibatches=2, ppo_epochs=3, optimizer=OptimizerConfig()),
    }
    return GRPOConfig(**(settings | changes))


def test_plan_of_an_asynchronous_run(tmp_path):
    plan = make_plan(rl_config(tmp_path), [Machine(cores=8)], num_rows=100)
    assert [process.name for process in plan.processes] == [
        "controller",
        "server-0",
        "server-1",
        "trainer-0",
        "trainer-1",
    ]
    config_yaml = str(tmp_path / "e" / "t" / "config.yaml")
    controller, server, _, _, trainer = plan.processes
    assert controller.argv[1:] == ("-m", "areal.trainer", "--config", config_yaml)
    assert server.argv[1:] == ("-m", "areal.inference.server", "--config", config_yaml)
    assert trainer.argv == controller.argv
    assert (trainer.env["RANK"], trainer.env["WORLD_SIZE"]) == ("1", "2")
    context = ProcessContext.from_env(trainer.env)
    assert (context.name, context.num_servers, context.device, context.recover) == ("trainer-1", 2, "cpu", False)
    numbers = plan.numbers
    assert (numbers.episodes_per_step, numbers.samples_per_step) == (8, 32)
    assert numbers.optimizer_steps_per_train_step == 6  # two minibatches, three epochs
    assert (numbers.max_staleness, numbers.max_concurrent_episodes) == (3, 32)
    assert (numbers.steps_per_epoch, numbers.total_steps) == (12, 12)
    assert json.loads(json.dumps(dataclasses.asdict(plan)))["recover"] is False
    assert "older episodes" in str(describe(plan))
    for mode, transport in (
        ("http", "http"),
        ("delta", "http"),
        ("disk", "disk"),
        ("delta_disk", "disk"),
        ("delta_xccl", "gloo"),
    ):
        config = rl_config(tmp_path)
        config = dataclasses.replace(config, actor=dataclasses.replace(config.actor, weight_update_mode=mode))
        plan = make_plan(config, [Machine(cores=8)])
        context = ProcessContext.from_env(plan.processes[-1].env)
        assert context.weight_transport == plan.weight_path.transport == transport


def test_script_runs_in_the_controller_and_in_every_trainer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = make_plan(rl_config(tmp_path), [Machine(cores=1)], script="train.py")
    scripts = [str(tmp_path / "train.py") in process.argv for process in plan.processes]
    assert scripts == [True, False, False, True, True]


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 2), (64, 4)])
def test_cores_are_divided_among_processes_that_compute(tmp_path, cores, threads):
    plan = make_plan(rl_config(tmp_path), [Machine(cores=cores)])
    shares = {process.role: process.num_threads for process in plan.processes}
    assert shares == {"controller": 1, "server": threads, "trainer": threads}
    assert plan.processes[1].env["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(
    ("cores", "inputs", "expected"),
    [(2, {}, "10000"), (8, {}, "10000"), (8, {"GOMP_SPINCOUNT": "5"}, "5"), (8, {"OMP_WAIT_POLICY": "ACTIVE"}, None)],
)
def test_threads_that_wait_for_each_other_sleep_soon(tmp_path, monkeypatch, cores, inputs, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in inputs.items():
        monkeypatch.setenv(name, value)
    plan = make_plan(rl_config(tmp_path), [Machine(cores=cores)])
    actual = {process.role: process.env.get("GOMP_SPINCOUNT") for process in plan.processes}
    assert actual == dict.fromkeys(("controller", "server", "trainer"), expected)


def test_every_process_gets_its_own_gpu(tmp_path):
    plan = make_plan(rl_config(tmp_path), [Machine(cores=32, gpus=("0", "3", "5", "6", "7"))])
    seen = {process.name: (process.gpus, process.env["CUDA_VISIBLE_DEVICES"]) for process in plan.processes}
    assert seen == {
        "controller": ((), ""),
        "server-0": (("0",), "0"),
        "server-1": (("3",), "3"),
        "trainer-0": (("5",), "5"),
        "trainer-1": (("6",), "6"),
    }
    context = ProcessContext.from_env(plan.processes[-1].env)
    assert context.device == "cuda:0"
    assert plan.processes[-1].env["LOCAL_RANK"] == "0"


def test_unused_gpus_are_reserved_for_added_replicas(tmp_path):
    plan = make_plan(rl_config(tmp_path), [Machine(cores=32, gpus=("0", "3", "5", "6", "7", "8"))])
    assert plan.spare_gpus == ((Host(), ("7", "8")),)
    joins = another_server(plan.processes[1], 2, host=Host(), gpus=("7",))
    assert (joins.name, joins.gpus, joins.env["CUDA_VISIBLE_DEVICES"]) == ("server-2", ("7",), "7")
    assert joins.num_threads == plan.processes[1].num_threads
    assert joins.log_path.endswith("server-2.log")
    assert ProcessContext.from_env(joins.env).name == "server-2"
    on_cpu = make_plan(rl_config(tmp_path), [Machine(cores=4)])
    assert on_cpu.spare_gpus == ()


def test_a_restarted_process_gets_the_changed_values(tmp_path):
    trainer = make_plan(rl_config(tmp_path), [Machine(cores=4)]).processes[-1]
    again = start_again(trainer, num_servers=3, run_id=2, recover=True)
    context = ProcessContext.from_env(again.env)
    assert (context.name, context.num_servers, context.run_id, context.recover) == ("trainer-1", 3, 2, True)
    assert again.env["RANK"] == "1"
    same = ProcessContext.from_env(start_again(again, num_servers=3).env)
    assert (same.run_id, same.recover) == (2, True)


def test_too_few_gpus_are_refused_and_none_means_cpu(tmp_path):
    with raises_code("launch.too_few_gpus"):
        make_plan(rl_config(tmp_path), [Machine(cores=8, gpus=("0", "1"))])
    on_cpu = rl_config(tmp_path, cluster=ClusterSpecConfig(fileroot=str(tmp_path), n_gpus_per_node=0))
    plan = make_plan(on_cpu, [Machine(cores=8, gpus=("0", "1"))])
    assert {process.device for process in plan.processes} == {"cpu"}
    assert {process.env["CUDA_VISIBLE_DEVICES"] for process in plan.processes} == {""}
    with raises_code("launch.no_gpu", "native.device=cuda"):
        make_plan(rl_config(tmp_path, native=NativeServerConfig(device="cuda")), [Machine(cores=8)])


def test_servers_on_the_cpu_leave_the_gpus_to_the_trainers(tmp_path):
    config = rl_config(tmp_path, native=NativeServerConfig(device="cpu"))
    plan = make_plan(config, [Machine(cores=8, gpus=("0", "1"))])
    assert [process.gpus for process in plan.processes] == [(), (), (), ("0",), ("1",)]


def test_supervised_run_starts_only_trainers(tmp_path, caplog):
    config = SFTConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode="fsdp:d2",
        cluster=ClusterSpecConfig(fileroot=str(tmp_path)),
        train_dataset=TrainDatasetConfig(path="x", batch_size=32, drop_last=False),
        total_train_epochs=3,
        total_train_steps=7,
        model=TrainEngineConfig(path="org/model", optimizer=OptimizerConfig()),
    )
    plan = make_plan(config, [Machine(cores=2)], num_rows=65)
    assert [process.name for process in plan.processes] == ["trainer-0", "trainer-1"]
    assert (plan.numbers.steps_per_epoch, plan.numbers.total_steps) == (3, 7)
    assert plan.numbers.max_staleness is None
    assert make_plan(config, [Machine(cores=2)]).numbers.total_steps is None
    two_epochs = dataclasses.replace(config, total_train_epochs=2)
    with caplog.at_level(logging.WARNING):
        assert make_plan(two_epochs, [Machine(cores=2)], num_rows=65).numbers.total_steps == 5  # 130 rows of 32 a step
    assert [record.args for record in caplog.records] == [("total_train_steps=7", "total_train_epochs", 5)]


def test_an_evaluation_has_no_notice_about_train_steps(tmp_path, caplog):
    make_plan(rl_config(tmp_path, "native:d1+eval", total_train_steps=900), [Machine(cores=2)], num_rows=8)
    assert not caplog.records


def test_runs_on_pairs_start_only_trainers_and_count_every_model(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(SMALL | {"model_type": "qwen2"}))
    model = {"path": str(tmp_path / "m"), "dtype": "float32"}
    common = {
        "experiment_name": "e",
        "trial_name": "t",
        "allocation_mode": "fsdp:d1",
        "cluster": ClusterSpecConfig(fileroot=str(tmp_path)),
        "train_dataset": TrainDatasetConfig(path="x", batch_size=32, type="rw"),
        "total_train_n_seqs": 640,
    }
    trained, frozen = TrainEngineConfig(**model, optimizer=OptimizerConfig()), TrainEngineConfig(**model)
    dpo = make_plan(DPOConfig(actor=trained, ref=frozen, **common), [Machine(cores=2)], num_rows=3200)
    free = DPOConfig(actor=trained, dpo=DPOOptions(reference_free=True), **common)
    reward = RWConfig(model=ScoreModelConfig(**model, optimizer=OptimizerConfig()), **common)
    plans = [dpo, *(make_plan(config, [Machine(cores=2)], num_rows=3200) for config in (free, reward))]
    assert [[process.name for process in plan.processes] for plan in plans] == [["trainer-0"]] * 3
    with_reference, *without = [plan.processes[0].memory_bytes for plan in plans]
    assert with_reference == without[0] * 5 // 4  # weights, gradient and two moments; the weights again
    assert {plan.numbers.total_steps for plan in plans} == {10}  # a pair is two sequences


def test_a_plan_with_more_processes_than_cores_has_a_warning(tmp_path):
    assert make_plan(rl_config(tmp_path), [Machine(cores=2)]).warning == ""
    crowded = make_plan(rl_config(tmp_path, "vllm:d9+fsdp:d1"), [Machine(cores=2)])
    assert "10 server and trainer processes share 2 cores" in crowded.warning


def test_environment_of_the_user(tmp_path):
    assert parse_env_vars(r"A=1, B=x\,y=z,C=\\,") == {"A": "1", "B": "x,y=z", "C": "\\"}
    assert parse_env_vars("") == {}
    for bad in ("A", "1A=2", "=3"):
        with raises_code("launch.bad_env_vars"):
            parse_env_vars(bad)
    launcher = LauncherConfig(trainer_env_vars="A=1", inference_server_env_vars="A=2,OMP_NUM_THREADS=9")
    plan = make_plan(rl_config(tmp_path, launcher=launcher), [Machine(cores=8)])
    result = {process.role: process.env.get("A") for process in plan.processes}
    assert result == {"controller": None, "server": "2", "trainer": "1"}
    assert plan.processes[1].env["OMP_NUM_THREADS"] == "9"


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
        ("llama", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": False, "tie_word_embeddings": True}),
        ("mistral", {"tie_word_embeddings": False, "head_dim": 16}),
    ],
)
def test_parameter_count_equals_that_of_transformers(tmp_path, kind, more):
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoConfig.for_model(kind, **SMALL, **more).save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    shape = ModelShape.read(str(tmp_path))
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())


def test_memory_of_a_process(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "qwen2", "tie_word_embeddings": True}))
    path = str(tmp_path)
    count = ModelShape.read(path).parameters
    trained = TrainEngineConfig(path=path, optimizer=OptimizerConfig())
    assert trained_bytes(trained, 1) == 16 * count
    assert trained_bytes(trained, 2) == 8 * count
    assert trained_bytes(TrainEngineConfig(path=path), 1) == 4 * count
    assert trained_bytes(TrainEngineConfig(path="org/hub-name"), 1) is None
    assert [bytes_text(size) for size in (None, 3 * 2**20, 3 * 2**29)] == ["unknown", "3.0 MiB", "1.50 GiB"]


def test_processes_of_several_nodes_listen_on_their_node_and_share_its_cores(tmp_path):
    nodes = [
        Machine(cores=cores, host=Host(bind=f"10.0.0.{n}", advertise=f"10.0.0.{n}", node=f"node{n}"))
        for n, cores in ((1, 4), (2, 8))
    ]
    plan = make_plan(rl_config(tmp_path, "native:d3+fsdp:d3"), nodes)
    by_node = {node.host.node: [p for p in plan.processes if p.host == node.host] for node in nodes}
    assert [p.name for p in by_node["node1"]] == ["controller", "server-1", "trainer-0"]
    assert [p.name for p in by_node["node2"]] == ["server-0", "server-2", "trainer-1", "trainer-2"]
    assert {p.num_threads for p in by_node["node1"] if p.role != "controller"} == {2}
    assert {p.num_threads for p in by_node["node2"]} == {2}
    contexts = [ProcessContext.from_env(p.env) for p in plan.processes]
    assert [context.host for context in contexts] == [p.host for p in plan.processes]


def parted(tmp_path, allocation="sglang:d1t8+fsdp:d4", **changes):
    hosts = [Host(bind=f"10.0.0.{number}", advertise=f"10.0.0.{number}", node=f"node{number}") for number in (1, 2, 3)]
    machines = [Machine(cores=16, gpus=("0", "1", "2", "3"), host=host) for host in hosts]
    return make_plan(rl_config(tmp_path, allocation, **changes), machines)


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("sglang", ["--nnodes=2", "--node-rank={part}", "--dist-init-addr={{first}}"]),
        (
            "vllm",
            ["--nnodes=2", "--node-rank={part}", "--master-addr={{first_address}}", "--master-port={{first_port}}"],
        ),
    ],
)
def test_a_server_over_two_machines_has_a_part_on_each(tmp_path, backend, words):
    plan = parted(tmp_path, f"{backend}:d1t8+fsdp:d4")
    for each in plan.processes:
        assert ProcessContext.from_env(each.env).num_parts == 2
        assert each.role == "server" or "--nnodes=2" not in each.argv
    parts = [process for process in plan.processes if process.role == "server"]
    assert [(item.name, item.index, item.part) for item in parts] == [("server-0", 0, 0), ("server-0-part-1", 0, 1)]
    assert [item.host.node for item in parts] == ["node1", "node2"]
    assert [item.env["CUDA_VISIBLE_DEVICES"] for item in parts] == ["0,1,2,3"] * 2
    assert {item.host.node for item in plan.processes if item.role == "trainer"} == {"node3"}
    assert plan.num_servers == 1
    for part, each in enumerate(parts):
        context = ProcessContext.from_env(each.env)
        assert (context.name, context.part, context.num_parts, context.num_servers) == (each.name, part, 2, 1)
        assert [word for word in words if word.format(part=part) not in each.argv] == []
        assert any(word in ("--tp-size=8", "--tensor-parallel-size=8") for word in each.argv)
        assert ("--headless" in each.argv) == (backend == "vllm" and part == 1)
    rows = [line.split() for line in plan_text(plan, None).partition("placement:")[2].splitlines()]
    assert ["node2", "10.0.0.2", "server-0-part-1", "0,1,2,3"] in [row[:4] for row in rows]


def test_each_part_of_a_server_over_several_machines_may_pull_weights(tmp_path):
    plan = parted(tmp_path, actor=dataclasses.replace(rl_config(tmp_path).actor, weight_update_mode="http"))
    contexts = [ProcessContext.from_env(process.env) for process in plan.processes if process.role == "server"]
    assert [context.weight_transport for context in contexts] == ["http", "http"]
    assert all("AREAL_TRAINER_ADDRESSES" in process.env for process in plan.processes if process.role == "server")


def test_a_replica_that_joins_may_run_on_another_machine(tmp_path):
    hosts = [Host(bind=f"10.0.0.{number}", advertise=f"10.0.0.{number}", node=f"node{number}") for number in (1, 2)]
    sizes = (("0", "1", "2", "3"), ("0", "1"))
    plan = make_plan(rl_config(tmp_path), [Machine(cores=8, gpus=g, host=h) for g, h in zip(sizes, hosts, strict=True)])
    joins = another_server(plan.processes[1], 2, host=hosts[1], gpus=("1",))
    assert (joins.host, joins.gpus) == (hosts[1], ("1",))
    assert ProcessContext.from_env(joins.env).host == hosts[1]
    assert joins.env["AREAL_TRAINER_ADDRESSES"] == "10.0.0.1,10.0.0.2", "a trainer may move to any machine of the run"


def test_the_text_of_a_plan_over_nodes_shows_each_node_with_its_processes_and_free_gpus(tmp_path):
    hosts = [Host(bind=f"10.0.0.{number}", advertise=f"10.0.0.{number}", node=f"node{number}") for number in (1, 2)]
    sizes = (("0", "1", "2"), ("0", "1"))
    plan = make_plan(rl_config(tmp_path), [Machine(cores=8, gpus=g, host=h) for g, h in zip(sizes, hosts, strict=True)])
    rows = [line.split() for line in plan_text(plan, None).partition("placement:")[2].splitlines()]
    shown = {(row[0], row[2]): row[3] for row in rows if row and row[0] in ("node1", "node2")}
    assert set(shown) >= {(process.host.node, process.name) for process in plan.processes}
    assert {(host.node, ",".join(gpus)) for host, gpus in plan.spare_gpus} == {
        (node, gpus) for (node, name), gpus in shown.items() if name == "free"
    }


def test_the_text_of_a_plan_shows_the_variables_of_servers_and_trainers(tmp_path):
    launcher = LauncherConfig(inference_server_env_vars="A=1", trainer_env_vars="B=2\\,3")
    config = dataclasses.replace(rl_config(tmp_path), launcher=launcher)
    lines = plan_text(make_plan(config, [Machine(cores=8, gpus=tuple("01234567"))]), None).splitlines()
    shown = {
        line.split(":")[0].strip(): lines[index + 2].split() for index, line in enumerate(lines) if ", CPU" in line
    }
    assert "A=1" in shown["server-0"]
    assert "B=2,3" in shown["trainer-0"]
    assert not {"A=1", "B=2,3"} & {*shown["controller"]}


def test_the_text_of_a_plan_leaves_out_the_search_path_of_programs(tmp_path):
    plan = make_plan(rl_config(tmp_path), [Machine(cores=8, gpus=tuple("01234567"))])
    servers = [dataclasses.replace(process, env={**process.env, "PATH": "/home/bin"}) for process in plan.processes]
    text = plan_text(dataclasses.replace(plan, processes=tuple(servers)), None)
    assert "/home/bin" not in text
    assert "CUDA_VISIBLE_DEVICES" in text


@pytest.mark.parametrize(("steps", "late"), [([1, 12], []), ([13, 12, 40], [13, 40])])
def test_profiles_of_steps_after_the_last_one_are_named(tmp_path, caplog, steps, late):
    config = rl_config(tmp_path, perf_tracer=PerfTracerConfig(profile_steps=steps))
    plan = make_plan(config, [Machine(cores=8)], num_rows=100)
    assert plan.numbers.total_steps == 12
    result = [record.args for record in caplog.records if "profile_steps" in record.getMessage()]
    assert result == ([(late, 12)] if late else [])


def test_gpu_hours_need_the_steps_and_the_seconds_of_a_step(tmp_path):
    config = rl_config(tmp_path)
    plan = make_plan(config, [Machine(cores=8, gpus=tuple("01234567"))], num_rows=400)
    used = sum(len(process.gpus) for process in plan.processes)
    hours = used * plan.numbers.total_steps * 90.0 / 3600
    assert f"about {hours:.1f}" in plan_text(plan, 90.0)
    assert "GPU hours: unknown" in plan_text(plan, None)
    on_cpu = make_plan(config, [Machine(cores=8)], num_rows=400)
    assert "GPU hours: 0 (the run uses no GPU: cluster.n_gpus_per_node=0" in plan_text(on_cpu, 90.0)
    assert f"about {hours:.1f}" in plan_text(plan, 1.0, given_step_s=90.0), "what the user gives comes first"
