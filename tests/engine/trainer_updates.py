"""Train steps with the losses of the trainer, for meshes against one process.

Each rank has one minibatch, because the trainer cuts the share of a rank: other meshes have other minibatches.
"""

from collections.abc import Callable
from dataclasses import replace

from areal.algorithm.advantage import RETURNS
from areal.api.batch import TrainBatch, required
from areal.api.config import PPOActorConfig, PPOCriticConfig, SFTOptions
from areal.api.engine import TrainEngine
from areal.api.metrics import Metrics
from areal.trainer.actor import PPOActor
from areal.trainer.roles import Critic
from areal.trainer.supervised import SFTTask


def _grpo(engine: TrainEngine, batch: TrainBatch) -> Metrics:
    """Two epochs, the second with clipped ratios, and weights against servers with other log-probabilities."""
    config = PPOActorConfig(path="", ppo_n_minibatches=1, ppo_epochs=2, eps_clip=0.1, use_decoupled_loss=True)
    actor = PPOActor(engine, config)
    batch = actor.with_prox_logprobs(batch)
    servers = required(batch.prox_logprobs, "prox_logprobs") + 0.3 * batch.column(RETURNS)
    return actor.update(actor.with_correction(replace(batch, rollout_logprobs=servers))[0])


def _ppo(engine: TrainEngine, batch: TrainBatch) -> Metrics:
    """The critic: two epochs, the second with clipped values."""
    critic = Critic(engine, PPOCriticConfig(path="", ppo_n_minibatches=1, ppo_epochs=2, eps_clip=0.05))
    return critic.update(critic.with_values(batch))


def _sft(engine: TrainEngine, batch: TrainBatch) -> Metrics:
    return SFTTask(engine, SFTOptions()).update(batch)


UPDATES: dict[str, Callable[[TrainEngine, TrainBatch], Metrics]] = {"grpo": _grpo, "ppo": _ppo, "sft": _sft}
