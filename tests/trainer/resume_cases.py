"""What one rank of `test_resume.py` does: a few steps of PPO or SFT with real engines, unbroken or in two lives."""

import os
import random
import signal
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal.api.batch import OutputSpec, TrainBatch
from areal.api.config import (
    KLControlConfig,
    MicroBatchSpec,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    RecoverConfig,
    SFTOptions,
)
from areal.api.config.policy_losses import AdaptiveEntropyConfig
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.trainer.actor import PPOActor
from areal.trainer.policy_update import output_spec
from areal.trainer.ppo_loop import batch_metrics
from areal.trainer.recover import ActorState, RecoverPoint, RecoverStore
from areal.trainer.roles import Critic, Reference, ReferenceResets
from areal.trainer.supervised import SFTTask

VOCAB, NUM_STEPS, CUT = 11, 5, 2
OPTIMIZER = OptimizerConfig(
    lr=2e-2, lr_scheduler_type="cosine", warmup_steps_proportion=0.4, gradient_clipping=0.2, weight_decay=0.1
)
MODEL = {"dtype": "float32", "optimizer": OPTIMIZER, "mb_spec": MicroBatchSpec(max_tokens_per_mb=24)}


@dataclass(frozen=True)
class Life:
    """What is trained from a start to an end."""

    engines: dict[str, TrainEngine]
    """What a recovery checkpoint holds."""
    train: Callable[[TrainBatch, int], Metrics]
    """One train step, counted from 0."""
    actor: PPOActor | None = None


def write_model(folder: Path, *, dropout: float) -> None:
    torch.manual_seed(3)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_dropout": dropout}
    sizes = {"vocab_size": VOCAB, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads)).save_pretrained(folder)


def batch_of(step: int, rank: int) -> TrainBatch:
    """Random rows, rewards and rollout log-probabilities; a pure function of step and rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(3, 12, (8,), generator=generator).tolist()
    rows = [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    batch = rows_to_train_batch(rows, [[0, *[1] * (length - 1)] for length in lengths])
    noise = 0.3 * torch.randn(batch.num_tokens, generator=generator)
    return replace(
        batch,
        rollout_logprobs=torch.where(batch.loss_mask, noise - 2.4, 0.0),
        output_versions=torch.where(batch.loss_mask, step, -1),
        rewards=torch.randint(0, 2, (8,), generator=generator).float(),
        group_ids=torch.arange(8) // 4,
        finished=torch.ones(8, dtype=torch.bool),
    )


def sft(path: Path, mesh: TrainerMesh) -> Life:
    config = PPOActorConfig(path=str(path), **MODEL)
    engine = build_fsdp_engine(config, role="actor", total_steps=NUM_STEPS, mesh=mesh, seed=0)
    task = SFTTask(engine, SFTOptions())
    return Life({"model": engine}, lambda batch, step: task.update(batch))


def ppo(path: Path, mesh: TrainerMesh) -> Life:
    """Two mini-batches, decoupled loss, clipped values."""
    actor_config = PPOActorConfig(path=str(path), ppo_n_minibatches=2, use_decoupled_loss=True, kl_ctl=0.0, **MODEL)
    critic_config = PPOCriticConfig(path=str(path), ppo_n_minibatches=2, **MODEL)
    steps = 2 * NUM_STEPS
    engines: dict[str, TrainEngine] = {
        "actor": build_fsdp_engine(actor_config, role="actor", total_steps=steps, mesh=mesh, seed=0),
        "critic": build_fsdp_engine(critic_config, role="critic", total_steps=steps, mesh=mesh, seed=0),
    }
    actor, critic = PPOActor(engines["actor"], actor_config), Critic(engines["critic"], critic_config)

    def train(batch: TrainBatch, step: int) -> Metrics:
        batch, _ = actor.with_correction(critic.with_values(actor.with_prox_logprobs(batch)))
        batch = actor.with_advantages(batch)
        return actor.update(batch, step=step) | critic.update(batch, step=step)

    return Life(engines, train, actor)


def kl(path: Path, mesh: TrainerMesh) -> Life:
    """Coefficients that adapt, the KL of the likeliest tokens in the loss, a reference reset after steps 2 and 4."""
    config = PPOActorConfig(
        path=str(path),
        ppo_n_minibatches=2,
        recompute_logprob=True,
        kl_ctl=0.2,
        kl_control=KLControlConfig(type="adaptive", target=0.01, horizon=40.0),
        kl_loss_coef=0.5,
        kl_loss_estimator="full",
        kl_top_k=3,
        entropy_coef=1e-3,
        adaptive_entropy=AdaptiveEntropyConfig(entropy_low=3.0, entropy_high=4.0),
        **MODEL,
    )
    outputs = output_spec(config)
    policy = build_fsdp_engine(config, role="actor", total_steps=2 * NUM_STEPS, mesh=mesh, seed=0, outputs=outputs)
    frozen = replace(config, optimizer=None)
    ref_outputs = OutputSpec(candidates=outputs.candidates)
    ref = build_fsdp_engine(frozen, role="ref", total_steps=0, mesh=mesh, seed=0, outputs=ref_outputs)
    actor = PPOActor(policy, config)
    reference = Reference(ref, config, resets=ReferenceResets(policy=policy, every_steps=2, with_optimizer=True))

    def train(batch: TrainBatch, step: int) -> Metrics:
        batch = reference.with_ref_logprobs(actor.with_prox_logprobs(batch))
        batch = actor.with_advantages(batch)
        return actor.update(batch, step=step) | batch_metrics(batch) | reference.after_update(step + 1)

    return Life({"actor": policy, "ref": ref}, train, actor)


KINDS = {"sft": sft, "ppo": ppo, "kl": kl}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def facts_of(life: Life, metrics: Metrics) -> dict[str, object]:
    """Everything that a step leaves, exactly: metrics, weights, coefficients, and what the generators give next to
    user code."""
    weights = {
        f"{role}/{name}": zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for role, engine in life.engines.items()
        for name, value in engine.named_weights()
    }
    draws = [random.random(), random.gauss(0, 1), float(np.random.randn()), float(torch.rand(1))]
    numbers = {name: [metric.total.hex(), metric.count.hex()] for name, metric in metrics.items()}
    state = {} if life.actor is None else life.actor.state().coefficients
    coefficients = {name: value.hex() for name, value in state.items()}
    return {"metrics": numbers, "weights": weights, "draws": draws, "coefficients": coefficients}


def point_of(life: Life, step: int) -> RecoverPoint:
    state = ActorState() if life.actor is None else life.actor.state()
    return RecoverPoint(step=step, cadence_s={}, elapsed_s=0.0, goal_reached={}, actor=state)


def go_on(life: Life, recover: Path, mesh: TrainerMesh) -> int:
    """Bring a new life to the newest checkpoint; returns the steps done."""
    store = RecoverStore(recover, RecoverConfig(mode="resume"), life.engines, mesh)
    source = store.start_from(after_failure=True)
    assert source is not None
    point = store.load(source)
    if life.actor is not None:
        life.actor.load_state(point.actor)
    return point.step


def run(kind: str, path: Path, recover: Path, mesh: TrainerMesh) -> dict[str, list[object]]:
    """Facts of the steps from `CUT` on: of the life that went on, and of one that began with its checkpoint."""
    seed_everything(7 + mesh.rank)
    life = KINDS[kind](path, mesh)
    result: dict[str, list[object]] = {"unbroken": [], "resumed": []}
    for step in range(NUM_STEPS):
        if step == CUT:
            RecoverStore(recover, RecoverConfig(), life.engines, mesh).save(point_of(life, step))
        facts = facts_of(life, life.train(batch_of(step, mesh.rank), step))
        if step >= CUT:
            result["unbroken"].append(facts)
    seed_everything(99)
    life = KINDS[kind](path, mesh)
    for step in range(go_on(life, recover, mesh), NUM_STEPS):
        result["resumed"].append(facts_of(life, life.train(batch_of(step, mesh.rank), step)))
    return result


def run_until_killed(kind: str, path: Path, recover: Path) -> None:
    """A life with a checkpoint after every step; killed in the middle of the step after the third."""
    torch.set_num_threads(1)
    seed_everything(7)
    mesh = TrainerMesh.open(None)
    life = KINDS[kind](path, mesh)
    store = RecoverStore(recover, RecoverConfig(), life.engines, mesh)
    for step in range(NUM_STEPS):
        facts_of(life, life.train(batch_of(step, mesh.rank), step))  # its draws move the generators, as in `run`
        if step == CUT + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        store.save(point_of(life, step + 1))


def on_two_ranks(mesh: TrainerMesh, folder: Path) -> dict[str, dict[str, list[dict]]]:
    return {kind: run(kind, folder / "model", folder / f"recover-{kind}", mesh) for kind in KINDS}
