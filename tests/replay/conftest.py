"""A run as a folder: a tiny model trained by the real loop on made-up episodes, with the ledger that a controller
would have written and the files that a launcher leaves."""

import asyncio
import io
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from areal.api.config import GRPOConfig
from areal.api.config.load import load_config, save_config
from areal.api.data import Trajectory, TrajectoryGroup
from areal.api.images import ImageRef
from areal.data.image_files import ImageFiles, encode_image
from areal.data.prompt_stream import PromptStream
from areal.data.tiny_model import IMAGE_TOKENS, character_tokenizer
from areal.engine.mesh import TrainerMesh
from areal.ledger.ledger import Ledger
from areal.ledger.payload import encode_episode, payload_head
from areal.models.vision_layout import read_vision_layout
from areal.observe.phase import PhaseClock
from areal.observe.step_files import JsonlTracker
from areal.replay import __main__ as command
from areal.replay.rank import NoServers, replay_on
from areal.rollout.train_batches import build_share, share_parts
from areal.system.process import ProcessContext
from areal.system.run_paths import RunPaths
from areal.trainer.after_step import AfterStep, StepHooks
from areal.trainer.ppo_loop import PPOLoop
from areal.trainer.process_setup import prepare_process
from areal.trainer.progress import Progress, TrainingLength
from areal.trainer.recover import RecoverStore
from areal.trainer.roles import build_roles
from areal.weights.weight_files import checksum_of
from examples.vision.tiny_vision import tiny_vision_model, write_image_processor
from tests.process_context import a_context

STEPS, BATCH, ROWS, VOCABULARY = 4, 2, 8, 11
CONFIG = """
experiment_name: test
trial_name: run
seed: 3
allocation_mode: native:d1+fsdp:d1
cluster: {fileroot: FOLDER}
total_train_epochs: 1
train_dataset: {path: none, batch_size: 2}
gconfig: {n_samples: 2}
recover: {mode: auto, freq_steps: 2}
actor:
  path: FOLDER/model
  dtype: float32
  ppo_n_minibatches: 2
  use_decoupled_loss: true
  reward_norm: {mean_level: group, std_level: null}
  optimizer: {lr: 1.0e-2, lr_scheduler_type: linear}
"""
WITH_ALL = """
critic: {path: FOLDER/model, dtype: float32, ppo_n_minibatches: 1, optimizer: {lr: 1.0e-3}}
ref: {path: FOLDER/model, dtype: float32}
"""


@dataclass(frozen=True)
class Run:
    """What a finished run left behind."""

    folder: Path
    config: GRPOConfig


def write_model(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        attention_dropout=0.1,  # so that the generators' state matters too
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def write_reward_model(folder: Path) -> None:
    """The model in `folder`/model with a head that scores, in `folder`/reward_model."""
    torch.manual_seed(2)
    model = Qwen2ForSequenceClassification.from_pretrained(folder / "model", num_labels=1, pad_token_id=0)
    model.save_pretrained(folder / "reward_model")


class FakeController:
    """A BatchSource that makes up episodes and keeps the books like a controller."""

    def __init__(
        self, folder: Path, runner: asyncio.Runner, reward=None, images: Sequence[ImageRef] = (), columns=None
    ) -> None:
        """`reward`: of an answer's token ids; None = a random number. `images`: each is that of some trajectories.
        `columns`: those of a workflow, for a trajectory."""
        self._columns = columns or (lambda made: {})
        self._reward = reward
        self._images = images
        self._ledger = Ledger.open(folder)
        self._runner = runner
        self._dice = random.Random(5)
        self._do(self._start())

    def _do(self, coroutine):
        return self._runner.run(coroutine)

    async def _start(self) -> None:
        self._ledger.start(pytest.fail)
        self._ledger.started(PromptStream(range(ROWS), seed=3, batch_size=BATCH), total_steps=STEPS)
        self._ledger.attached(step=0, version=0)
        await self._ledger.durable()

    def _trajectory(self, version: int) -> Trajectory:
        size = self._dice.randint(3, 9)
        made = Trajectory(
            token_ids=[self._dice.randrange(VOCABULARY) for _ in range(size)],
            loss_mask=[0] + [1] * (size - 1),
            rollout_logprobs=[0.0] + [-self._dice.random() - 1.5 for _ in range(size - 1)],
            output_versions=[-1] + [max(version - self._dice.randint(0, 2), 0)] * (size - 1),
            reward=self._dice.random(),
            finished=True,
        )
        made = replace(made, columns=self._columns(made))
        if self._images:
            return self._with_image(made)
        return made if self._reward is None else replace(made, reward=self._reward(made.token_ids[1:]))

    def _with_image(self, made: Trajectory) -> Trajectory:
        """The answer after an image, without tokens of images."""
        image = self._dice.choice(self._images)
        start, end, place, _ = range(3, 3 + len(IMAGE_TOKENS))
        before = [start, *[place] * (image.grid[1] * image.grid[2] // 4), end]
        size = len(before)
        return replace(
            made,
            token_ids=before + [7 + token % 4 for token in made.token_ids],
            loss_mask=[0] * size + list(made.loss_mask),
            rollout_logprobs=[0.0] * size + list(made.rollout_logprobs),
            output_versions=[-1] * size + list(made.output_versions),
            images=(image,),
        )

    async def _compose(self, step: int):
        ids, payloads = [], []
        for _ in range(BATCH):
            episode = self._ledger.admit(version=step)
            group = TrajectoryGroup(trajectories=[self._trajectory(step), self._trajectory(step)])
            encoded = encode_episode(episode, group)
            self._ledger.accept(episode, encoded, stats={}, seconds=0.1, replicas=["server-0"], num_interruptions=0)
            ids.append(episode)
            payloads.append(encoded.payload)
        stats = {"reward": 0.5}
        record = self._ledger.batched(
            step=step, version=step, mask_before=max(step - 1, 0), episode_ids=ids, stats=stats
        )
        await self._ledger.durable()
        (part,) = share_parts([payload_head(payload) for payload in payloads], 1)
        return build_share(payloads, part, step=step, version=step, mask_before=record.mask_before, stats=stats)

    def next_batch(self, step):
        return self._do(self._compose(step))

    def consumed(self, step, version, weights_checksum, ess):
        async def write() -> None:
            self._ledger.published(version=version, kind="disk", path="")
            self._ledger.consumed(step=step, version=version, weights=weights_checksum)
            await self._ledger.durable()

        self._do(write())

    def close(self) -> None:
        self._do(self._ledger.close())


def write_vision_model(folder: Path) -> None:
    tokenizer = character_tokenizer(["<pad>", "<eos>", "<unk>", *IMAGE_TOKENS, *"abcd"])
    tiny_vision_model(tokenizer, 1, width=32).save_pretrained(folder)
    write_image_processor(folder, max_pixels=56 * 56)


def write_images(model: Path, files: ImageFiles) -> list[ImageRef]:
    """Two images in the size that the model takes."""
    layout, result = read_vision_layout(str(model)), list[ImageRef]()
    assert layout is not None
    for size in ((56, 56), (28, 56)):
        target = io.BytesIO()
        Image.effect_noise(size, 90).convert("RGB").save(target, "PNG")
        png, grid = encode_image(target.getvalue(), layout)
        result.append(ImageRef(files.put(png), grid))
    return result


def train(folder: Path, text: str, reward=None, *, with_images: bool = False, columns=None) -> Run:
    """The live run: everything real but the controller and the servers."""
    if with_images:
        write_vision_model(folder / "model")
    else:
        write_model(folder / "model", seed=1)
    if "FOLDER/reward_model" in text:
        write_reward_model(folder)
    (folder / "given.yaml").write_text(text.replace("FOLDER", str(folder)))
    config = load_config(["--config", str(folder / "given.yaml")], GRPOConfig)
    paths = RunPaths(folder / "run")
    paths.root.mkdir()
    save_config(config, paths.config, extra={"key_of_a_script": 1})
    context = context_of(paths.root)
    plan = {"processes": [{"role": "controller", "env": {}}, {"role": "trainer", "env": context.to_env()}]}
    paths.plan.write_text(json.dumps(plan))

    prepare_process(context, config.seed)
    mesh = TrainerMesh.open(context)
    length = TrainingLength.of(config, num_rows=ROWS, samples_per_row=2)
    files = ImageFiles(paths.images)
    images = write_images(folder / "model", files) if with_images else ()
    roles = build_roles(config, mesh, length, images=files)
    initial = {role: checksum_of(engine, mesh) for role, engine in roles.engines.items()}
    paths.initial_weights.write_text(json.dumps(initial))
    recover = RecoverStore(paths.recover, config.recover, roles.recovered, mesh)
    recover.start_from(after_failure=False)
    with asyncio.Runner() as runner:
        controller = FakeController(paths.ledger, runner, reward, images, columns)
        after_step = AfterStep(
            config,
            roles.trained,
            mesh,
            paths=paths,
            recover=recover,
            trackers=[JsonlTracker(paths.metrics)],
            hooks=StepHooks(
                evaluate=None,
                goal_reached=lambda result: False,
                committed=lambda step, path: None,
                actor_state=roles.actor.state,
            ),
        )
        PPOLoop(
            roles=roles,
            batches=controller,
            channel=NoServers(roles.trained["actor"], mesh),
            ranks=mesh,
            after_step=after_step,
            progress=Progress(length),
            clock=PhaseClock(),
        ).run()
        after_step.close()
        controller.close()
    return Run(paths.root, config)


def context_of(folder: Path) -> ProcessContext:
    return a_context(run_dir=str(folder))


@pytest.fixture(scope="session")
def recorded(tmp_path_factory) -> Run:
    """A run of an actor alone. Not to be changed: see `run`."""
    return train(tmp_path_factory.mktemp("recorded"), CONFIG)


@pytest.fixture
def recorded_with_rewards(tmp_path):
    """The run of `recorded` with another reward function."""
    return lambda reward: train(tmp_path, CONFIG, reward)


@pytest.fixture(scope="session")
def recorded_with_images(tmp_path_factory) -> Run:
    """A run whose trajectories have an image each."""
    return train(tmp_path_factory.mktemp("recorded_with_images"), CONFIG, with_images=True)


@pytest.fixture(scope="session")
def recorded_with_all(tmp_path_factory) -> Run:
    """A run with a critic and a reference."""
    return train(tmp_path_factory.mktemp("recorded_with_all"), CONFIG + WITH_ALL)


@pytest.fixture(scope="session")
def recorded_with_resets(tmp_path_factory) -> Run:
    """A run whose reference is reset after steps 2 and 4, with an adaptive KL penalty and a KL term in the loss."""
    adaptive = "kl_ctl: 0.1\n  kl_control: {type: adaptive, target: 0.01, horizon: 20}"
    in_loss = "kl_loss_coef: 0.2\n  kl_loss_estimator: full\n  kl_top_k: 3"
    text = CONFIG.replace("  reward_norm:", f"  {adaptive}\n  {in_loss}\n  reward_norm:")
    resets = "ref_reset_steps: 2\nref_reset_optimizer: true\n"
    return train(tmp_path_factory.mktemp("recorded_with_resets"), text + WITH_ALL + resets)


@pytest.fixture(scope="session")
def recorded_with_epochs(tmp_path_factory) -> Run:
    """A run with every part of the loss assembly, whose critic has the first step for itself."""
    assembly = """ppo_epochs: 2
  target_kl: 0.05
  loss_aggregation: seq-mean-token-mean
  entropy_coef: 0.01
  entropy_clamp: 0.2
  adaptive_entropy: {entropy_low: 9, entropy_high: 10, coef_lr: 1.0e-3, coef_high: 1}
  positive_nll_coef: 0.1
  mask_truncated: true
  dynamic_sampling: true
  shared_prefix_min_tokens: 1
"""
    text = CONFIG.replace("  ppo_n_minibatches: 2\n", f"  ppo_n_minibatches: 2\n  {assembly}")
    critic = "huber_delta: 1.0, eps_clip: null, ppo_epochs: 2, warmup_steps: 1, gae_lambda: 0.9, optimizer"
    return train(tmp_path_factory.mktemp("recorded_with_epochs"), text + WITH_ALL.replace("optimizer", critic))


@pytest.fixture(scope="session")
def recorded_with_roles(tmp_path_factory) -> Run:
    """A run with a teacher, an average of the policy, and a reward model."""
    roles = """
teacher:
  {path: FOLDER/model, init_from_scratch: true, dtype: float32, advantage_coef: 0.5, loss_coef: 0.1, average_decay: 0.5}
reward_model: {path: FOLDER/reward_model, dtype: float32, weight: 0.5}
reward_fn: none
"""
    return train(tmp_path_factory.mktemp("recorded_with_roles"), CONFIG + roles)


@pytest.fixture
def ranks_in_process(monkeypatch):
    """The ranks' work without processes of their own."""

    def run_ranks(ranks, on_poll):
        for rank in ranks:
            context = ProcessContext.from_env(rank.env)
            replay_on(context, Path(context.run_dir))
        on_poll()

    monkeypatch.setattr(command, "run_ranks", run_ranks)
