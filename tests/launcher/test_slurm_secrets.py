"""Secrets of a run on Slurm: in the environment of its job, and in no file."""

from areal.api.config import (
    ClusterSpecConfig,
    GRPOConfig,
    LauncherConfig,
    PPOActorConfig,
    StatsLoggerConfig,
    TrainDatasetConfig,
    WandBConfig,
)
from areal.launcher import slurm
from areal.launcher.local import Launch
from areal.launcher.slurm_job import Resources
from areal.system.run_paths import RunPaths

SECRET = "s3cr3t-value"


def test_a_job_gets_secrets_through_its_environment_only(tmp_path, monkeypatch) -> None:
    submitted = []
    config = GRPOConfig(
        experiment_name="e",
        trial_name="t",
        allocation_mode="native:d1+fsdp:d1",
        train_dataset=TrainDatasetConfig(path="x.jsonl", batch_size=4),
        cluster=ClusterSpecConfig(fileroot=str(tmp_path)),
        actor=PPOActorConfig(path="m"),
        stats_logger=StatsLoggerConfig(wandb=WandBConfig(wandb_api_key=SECRET)),
        launcher=LauncherConfig(trainer_env_vars=f"A=1,HF_TOKEN={SECRET}"),
    )
    needs = Resources(nodes=1, gpus=0, cpus=1, memory_mib=1)
    monkeypatch.setattr(slurm, "checked_plan", lambda request, machines, line: None)
    monkeypatch.setattr(slurm, "resources_of", lambda plan, config: needs)
    monkeypatch.setattr(slurm.SlurmClient, "kill_wait_s", lambda self: None)
    monkeypatch.setattr(
        slurm.SlurmClient, "submit", lambda self, script, environment, request: submitted.append(environment) or "7"
    )
    paths = RunPaths.of(config)
    request = Launch(config=config, extras={}, script=None, dry_run=False)
    assert slurm.submit([request], paths, at_once=0, detach=True) == 0
    files = [path for path in paths.root.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"job.sh", "config.yaml", "job.json"}
    assert not [path for path in files if SECRET in path.read_text()]
    (environment,) = submitted
    assert environment["HF_TOKEN"] == environment["AREAL_SECRET_STATS_LOGGER_WANDB_WANDB_API_KEY"] == SECRET
    assert "A" not in environment
