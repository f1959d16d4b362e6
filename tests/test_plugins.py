"""The recipes of CONTRIBUTING.md: a package of another author adds a loss, an estimator, a workflow, a backend and a
tracker without a change in areal, and each runs."""

import json
import re
from pathlib import Path

import pytest
import torch

from areal.algorithm.advantage import RewardedAnswers, estimated
from areal.algorithm.aggregate import identity_reduce, to_metrics
from areal.algorithm.losses import policy_loss
from areal.algorithm.policy_loss import PolicyTokens
from areal.api import registry
from areal.api.config import GRPOConfig, load_config
from areal.api.config.schema import fields_of
from areal.api.errors import ConfigError
from areal.data.tiny_model import character_tokenizer
from areal.fleet.server_backend import backend_named, replica_factory
from areal.launcher.job import make_plan
from areal.launcher.placement import Machine
from areal.observe.trackers import build_trackers
from areal.system.run_paths import RunPaths
from areal.trainer.actor import PPOActor
from areal.workflow.registry import build_workflow

REGISTERED = '''
"""What the package adds. Runs in every process, so it loads no torch."""

from dataclasses import dataclass

from areal.api.config.policy_losses import LossFacts
from areal.api.config.schema import Named, number
from areal.api.registry import register


@dataclass(frozen=True, kw_only=True)
class TanhOptions(Named):
    """A loss with a soft bound."""

    bound: float = number(1.0, above=0)
    """Largest loss of a token."""


@dataclass(frozen=True, kw_only=True)
class ShiftOptions(Named):
    """An estimator that shifts rewards."""

    shift: float = number(0.0)
    """Added to every reward."""


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """A tracker that writes a file."""

    file: str = "dummy.jsonl"
    """Name of the file in the run folder."""


register("losses", "tanh", "areal_dummy.maths:tanh_loss", options=TanhOptions, facts=LossFacts(clips=True))
register("estimators", "shifted", "areal_dummy.maths:shifted", options=ShiftOptions)
register("workflows", "ask_once", "areal_dummy.episodes:AskOnce")
register("backends", "dummy", "areal_dummy.server:DUMMY")
register("trackers", "dummy_file", "areal_dummy.tracker:FileTracker", options=FileOptions)
'''
MATHS = """
import torch

from areal.algorithm.advantage import Estimate
from areal.algorithm.aggregate import TokenStat
from areal.algorithm.policy_loss import PolicyLoss, policy_ratio, ratio_stats


def tanh_loss(tokens, options):
    ratio, bound = policy_ratio(tokens, options), options.policy_loss.bound
    losses = -bound * torch.tanh(ratio.advantages * ratio.value / bound)
    stats = ratio_stats(tokens, ratio) | {"bounded": TokenStat(losses.abs() > 0.9 * bound, tokens.mask)}
    return PolicyLoss(losses=torch.where(tokens.mask, losses, 0.0), stats=stats)


def shifted(answers, options):
    advantages = (answers.rewards + options.adv_estimator.shift)[answers.sequence_index]
    return Estimate(advantages, {"shifted_mean": TokenStat(advantages, answers.mask)})
"""
EPISODES = """
from areal.api.data import GenerationRequest
from areal.api.workflow import RolloutWorkflow


class AskOnce(RolloutWorkflow):
    def __init__(self, gconfig, tokenizer, prompt="a"):
        self._gconfig, self._ids = gconfig, tokenizer.encode(prompt)

    async def arun_episode(self, engine, data):
        answer = await engine.agenerate(GenerationRequest(request_id="r", input_ids=self._ids, gconfig=self._gconfig))
        assert answer.output_ids
        return None
"""
SERVER = """
from areal.fleet.server_backend import FlagRules, ServerBackend, foreign_command


class DummyClient:
    def __init__(self, name, address, token, form):
        self.name, self.address = name, address


def command(config, on_gpu):
    return foreign_command(config, DUMMY, program=("-m", "dummy", DUMMY.model(config)), defaults={}, owned={}, env={})


DUMMY = ServerBackend(
    name="dummy",
    title="Dummy",
    client=DummyClient,
    command=command,
    model_key="model",
    context_key="max_len",
    sampling_problems=lambda gconfig, flags, needs_logprobs: iter(()),
    flags=FlagRules(seed="seed", tokenizer="tokenizer", owned={"port": "areal chooses it"}, fixed={}, negatable=False),
)
"""
TRACKER = """
import json
import re


class FileTracker:
    def __init__(self, settings, run):
        self._path = run.paths.root / settings.file

    def log(self, step, values):
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": step} | values) + "\\n")

    def log_samples(self, step, rows): ...
    def flush(self): ...
    def close(self): ...
"""
CONFIG = """
experiment_name: e
trial_name: t
allocation_mode: dummy:d1+fsdp:d1
cluster: {fileroot: FILEROOT}
train_dataset: {path: x.jsonl, batch_size: 4}
reward_fn: exact
workflow: ask_once
actor:
  path: org/model
  optimizer: {lr: 1e-5}
  policy_loss: {name: tanh, bound: 2.0}
  adv_estimator: {name: shifted, shift: 0.5}
server_flags_of: {dummy: {shout: 2}}
stats_logger: {trackers: {dummy_file: {file: mine.jsonl}}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A configuration that names everything of the package, which is installed as pip would install it."""
    folder = tmp_path_factory.mktemp("plugins")
    texts = {"registered": REGISTERED, "maths": MATHS, "episodes": EPISODES, "server": SERVER, "tracker": TRACKER}
    for name, text in {"__init__": "", **texts}.items():
        path = folder / "site" / "areal_dummy" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / "site" / "areal_dummy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-dummy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[areal.plugins]\ndummy = areal_dummy.registered\n")
    file = folder / "c.yaml"
    file.write_text(CONFIG.replace("FILEROOT", str(folder / "runs")))
    registry.entries("losses")
    before = {kind: dict(known) for kind, known in registry._ENTRIES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder / "site")
        for cache in (registry._load_registrations, fields_of):
            cache.cache_clear()
        yield lambda *overrides: load_config(["--config", str(file), *overrides], GRPOConfig)
    for kind, known in registry._ENTRIES.items():
        for name in known.keys() - before[kind].keys():
            del known[name]
    fields_of.cache_clear()


def test_a_loss_with_an_option(config):
    actor = config().actor
    logprobs = torch.tensor([0.2, 0.9]).log().requires_grad_()
    tokens = PolicyTokens(
        logprobs=logprobs,
        old_logprobs=torch.tensor([0.4, 0.3]).log(),
        rollout_logprobs=torch.tensor([0.4, 0.3]).log(),
        advantages=torch.tensor([1.0, -1.0]),
        mask=torch.tensor([True, True]),
        sequence_index=torch.tensor([0, 0]),
        num_sequences=1,
    )
    result = policy_loss(tokens, actor)
    expected = [-2 * torch.tanh(torch.tensor(0.25)).item(), 2 * torch.tanh(torch.tensor(1.5)).item()]
    assert result.losses.tolist() == pytest.approx(expected, abs=1e-5)
    result.losses.sum().backward()
    assert logprobs.grad.isfinite().all()
    assert "bounded" in to_metrics(result.stats)


def test_its_option_cannot_be_given_in_vain(config):
    with pytest.raises(ConfigError) as caught:
        config("actor.policy_loss=ppo", "actor.policy_loss.bound=2", "actor.adv_estimator.shift=x")
    assert [(problem.path, problem.code) for problem in caught.value.problems] == [
        ("actor.policy_loss.bound", "config.unknown_key"),
        ("actor.adv_estimator.shift", "config.wrong_type"),
    ]


def test_an_estimator_with_a_statistic(config):
    index = torch.tensor([0, 0, 1])
    answers = RewardedAnswers(
        rewards=torch.tensor([1.0, 0.0]),
        token_rewards=torch.tensor([0.0, 1.0, 0.0]),
        mask=torch.tensor([True, True, True]),
        sequence_index=index,
        num_sequences=2,
        group_ids=torch.tensor([0, 0]),
        finished=torch.tensor([True, True]),
        logprobs=torch.zeros(3),
        values=None,
        columns={},
        reduce=identity_reduce,
    )
    actor = config().actor
    result = estimated(answers, actor)
    assert result.advantages.tolist() == [1.5, 1.5, 0.5]
    assert to_metrics(result.stats)["shifted_mean"].total == pytest.approx(3.5)
    PPOActor(None, actor)  # calls loss and estimator once, without tokens


class OneAnswer:
    version = 0

    async def agenerate(self, request):
        self.asked = request
        return type("Answer", (), {"output_ids": [1]})()


async def test_a_workflow(config):
    tokenizer = character_tokenizer(["<pad>", "<eos>", "<unk>", "a"], context_length=8)
    workflow, engine = build_workflow(config(), tokenizer), OneAnswer()
    assert await workflow.arun_episode(engine, {}) is None
    assert engine.asked.input_ids == tokenizer.encode("a")


def test_a_backend(config):
    chosen = config()
    assert list(backend_named("dummy").problems(chosen)) == []
    server = make_plan(chosen, [Machine(cores=4)]).processes[1]
    assert {"org/model", "--shout=2", "--port={port}"} < set(server.argv)
    assert replica_factory("dummy")("server-0", "http://h:1", None).address == "http://h:1"


def test_a_tracker(config):
    chosen = config()
    paths = RunPaths.of(chosen)
    paths.root.mkdir(parents=True)
    trackers = build_trackers(chosen, paths)
    for tracker in trackers:
        tracker.log(1, {"loss": 0.5})
        tracker.close()
    assert json.loads((paths.root / "mine.jsonl").read_text()) == {"step": 1, "loss": 0.5}
    with pytest.raises(ConfigError) as caught:
        config("stats_logger.trackers={dummy_file: {fiel: x}, other: {}}")
    assert [problem.path for problem in caught.value.problems] == [
        "stats_logger.trackers.dummy_file.fiel",
        "stats_logger.trackers.other",
    ]


def test_the_recipes_name_files_that_exist():
    root = Path(__file__).parents[1]
    recipes = (root / "CONTRIBUTING.md").read_text().partition("## Recipes")[2]
    things = ("policy loss", "advantage estimator", "workflow", "inference backend", "tracker", "optimiser")
    for title in things:
        assert re.search(rf"^### An? {title}$", recipes, re.M)
    names = {word.strip("`") for word in recipes.split() if word.startswith(("`areal/", "`tests/", "`docs/"))}
    named = [name.rstrip("`:,.;") for name in names if "NAME" not in name]
    assert [name for name in named if not (root / name).exists()] == []
