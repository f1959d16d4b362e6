"""`workflow: textarena` and `workflow: openenv` over fake packages."""

import asyncio
import os
import random
import signal
from contextlib import asynccontextmanager

import pytest

from areal.api.engine import InferenceEngine
from areal.api.errors import AgentFailed, ConfigError
from areal.api.workflow import EPISODE_ID
from areal.environments.textarena import Opponents, TextArenaWorkflow
from areal.environments.workflow import OpenEnvWorkflow
from tests.environments.environment_kit import build, policy, trained_text

pytestmark = pytest.mark.usefixtures("in_fakes")
ROW = {"config": {}, "seed": 4, "index": 1}


def target(row, limit=9):
    return random.Random(row["seed"] + row["index"]).randrange(limit)


def arena(make, **options):
    return make(TextArenaWorkflow, **{"env": "Guess-v0", **options})


def scripted(*answers):
    """A policy that gives these answers one after another, whatever it is asked."""
    left = list(answers)
    return policy(lambda _: left.pop(0))


@pytest.mark.parametrize(
    ("answers", "config", "rewards", "invalid"),
    [
        ([str((target(ROW) + 1) % 9), str(target(ROW))], {}, [1.0], 0.0),
        (["x"], {}, [0.4], 1.0),
        (["x"], {"invalid_reward": -0.5}, [-0.5], 1.0),
        ([str(target(ROW, 3))], {"options": {"limit": 3}}, [1.0], 0.0),
    ],
)
async def test_a_game_gives_its_reward_unless_an_invalid_move_has_another(
    make, answers, config, rewards, invalid
) -> None:
    group = await arena(make).arun_episode(scripted(*answers), ROW | {"config": config})
    assert [trajectory.reward for trajectory in group.trajectories] == rewards
    assert group.stats["reward/invalid_end"] == invalid
    assert trained_text(group.trajectories[0]) == "".join(f"{answer}<|im_end|>" for answer in answers)


async def test_both_players_of_self_play_are_trained_each_with_its_own_dialogue(make) -> None:
    wrong, right = str((target(ROW) + 1) % 9), str(target(ROW))
    group = await arena(make, env="Race-v0").arun_episode(scripted(wrong, right), dict(ROW))
    assert [(trajectory.reward, trained_text(trajectory)) for trajectory in group.trajectories] == [
        (-1.0, f"{wrong}<|im_end|>"),
        (1.0, f"{right}<|im_end|>"),
    ]


async def test_a_player_without_a_turn_is_no_session(make) -> None:
    group = await arena(make, env="Race-v0").arun_episode(scripted("x"), dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [0.4]
    assert group.rejected == ""


async def test_a_game_that_player_1_begins_and_ends_is_that_of_player_1(make) -> None:
    group = await arena(make, env="Late-v0").arun_episode(scripted("x"), dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [0.4]
    assert group.rejected == ""


async def test_a_function_plays_the_other_side(make, tmp_path) -> None:
    file = tmp_path / "opponent.py"
    file.write_text(f"def play(text, rng):\n    return '{(target(ROW) + 1) % 9}'\n")
    workflow = arena(make, env="Race-v0", args={"opponent": f"{file}:play", "trained": 1})
    group = await workflow.arun_episode(scripted(str(target(ROW))), dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0]
    assert group.stats["reward/moves"] == 2


class Older(InferenceEngine):
    """Two policies by the adapter of a request; the older ones are kept as empty folders."""

    version, timeline = 5, "a"

    def __init__(self, current, older):
        self._current, self._older, self.held = current, older, []

    async def agenerate(self, request):
        return await (self._older if request.adapter else self._current).agenerate(request)

    async def keep_policy(self, parent):
        folder = parent / f"policy-v{self.version:06d}-{self.timeline}"
        folder.mkdir()
        return folder

    @asynccontextmanager
    async def older_policy(self, folder):
        self.held.append(folder.name)
        yield


@pytest.mark.parametrize(("trained", "reward"), [(0, -1.0), (1, 1.0)])
async def test_an_older_policy_plays_the_other_side_and_is_not_trained(make, tmp_path, trained, reward) -> None:
    right, wrong = str(target(ROW)), str((target(ROW) + 1) % 9)
    by_player = {trained: wrong if trained == 0 else right, 1 - trained: right if trained == 0 else wrong}
    engine = Older(scripted(*[by_player[trained]] * 8), scripted(*[by_player[1 - trained]] * 8))

    async def played(episode, version):
        engine.version = version
        workflow = arena(make, env="Race-v0", args={"trained": trained, "opponent": {"steps": 4}})
        workflow._opponents = Opponents(tmp_path)  # as after a kill
        EPISODE_ID.set(episode)
        return await workflow.arun_episode(engine, dict(ROW))

    group = await played(0, 5)
    assert [(trajectory.reward, trained_text(trajectory)) for trajectory in group.trajectories] == [
        (reward, f"{by_player[trained]}<|im_end|>")
    ]
    assert [(await played(*item)).stats["opponent_version"] for item in ((1, 7), (2, 8), (3, 9))] == [5, 8, 8]


async def test_an_episode_that_runs_again_after_a_kill_has_the_opponent_of_its_first_start(tmp_path) -> None:
    engine, opponents = Older(None, None), Opponents(tmp_path)
    with pytest.raises(asyncio.CancelledError):
        async with opponents.of_episode(0, engine, 4) as first:
            raise asyncio.CancelledError
    engine.version = 9
    for episode, expected in ((1, "policy-v000009-a"), (0, first)):
        async with Opponents(tmp_path).of_episode(episode, engine, 4) as actual:
            assert (actual, engine.held[-1]) == (expected, expected)


def kept(folder):
    return sorted(path.name.removeprefix("policy-v00000") for path in folder.glob("policy-v*"))


async def test_policies_are_deleted_that_no_running_episode_plays_against(tmp_path) -> None:
    engine, opponents = Older(None, None), Opponents(tmp_path)
    async with opponents.of_episode(0, engine, 1):
        for version in (6, 7, 8):
            engine.version = version
            async with opponents.of_episode(version, engine, 1):
                assert kept(tmp_path) == ["5-a", f"{version}-a"]
        with pytest.raises(ValueError):  # noqa: PT011 - that of the line below
            async with opponents.of_episode(9, engine, 1):
                raise ValueError
    engine.version = 9
    async with opponents.of_episode(10, engine, 1):
        assert (kept(tmp_path), opponents._names) == (["9-a"], {10: "policy-v000009-a"})


async def test_after_a_kill_policies_are_deleted_of_episodes_that_do_not_run_again(tmp_path) -> None:
    engine, opponents = Older(None, None), Opponents(tmp_path)
    async with opponents.of_episode(0, engine, 1):
        engine.version = 6
        with pytest.raises(asyncio.CancelledError):
            async with opponents.of_episode(1, engine, 1):
                raise asyncio.CancelledError
    assert kept(tmp_path) == ["5-a", "6-a"]
    again, engine.version = Opponents(tmp_path), 9
    async with again.of_episode(1, engine, 1), again.of_episode(2, engine, 1):
        assert kept(tmp_path) == ["6-a", "9-a"]
    assert (again._names, again._before) == ({}, {})


async def test_a_policy_of_an_abandoned_timeline_is_not_the_opponent_of_a_new_episode(tmp_path) -> None:
    engine, opponents = Older(None, None), Opponents(tmp_path)
    result = []
    for episode, (version, timeline) in enumerate([(7, "a"), (6, "b"), (7, "b")]):
        engine.version, engine.timeline = version, timeline
        async with opponents.of_episode(episode, engine, 4) as name:
            result.append(name.removeprefix("policy-v00000"))
    assert result == ["7-a", "6-b", "6-b"]


async def test_an_opponent_is_on_disk_before_its_episode_plays(tmp_path, monkeypatch) -> None:
    engine, opponents, synced = Older(None, None), Opponents(tmp_path), []
    monkeypatch.setattr(os, "fsync", lambda _: synced.append((tmp_path / "opponents.jsonl").read_text()))
    async with opponents.of_episode(3, engine, 4):
        assert synced == ['{"episode":3,"policy":"policy-v000005-a"}\n']


@pytest.mark.parametrize("trained", [0, 1])
async def test_a_game_that_fails_before_the_trained_player_has_a_turn_is_an_error(make, tmp_path, trained) -> None:
    EPISODE_ID.set(0)
    workflow = arena(make, env="NoSuch-v0", args={"trained": trained, "opponent": {"steps": 4}})
    workflow._opponents = Opponents(tmp_path)
    with pytest.raises(AgentFailed, match="no game 'NoSuch-v0'"):
        await workflow.arun_episode(Older(scripted(), scripted()), dict(ROW))


async def test_a_game_that_the_older_policy_ends_before_the_first_turn_trains_nothing(make, tmp_path) -> None:
    EPISODE_ID.set(0)
    workflow = arena(make, env="Race-v0", args={"trained": 1, "opponent": {"steps": 4}})
    workflow._opponents = Opponents(tmp_path)
    group = await workflow.arun_episode(Older(scripted(), scripted("x")), dict(ROW))
    assert (group.trajectories, group.rejected) == ([], "no_turns")


async def test_games_at_the_same_time_do_not_share_random_numbers(make) -> None:
    rows = [ROW | {"index": index} for index in range(4)]
    workflow = arena(make)
    groups = [await workflow.arun_episode(scripted(str(target(row))), row) for row in rows]
    assert [group.trajectories[0].reward for group in groups] == [1.0] * 4


@pytest.mark.parametrize("opponent", [{"steps": 0}, {"steps": 1.5}, {"steps": True}, {"steps": 4, "top": 1}, {}, 4])
def test_an_opponent_that_is_no_function_and_no_number_of_steps_is_refused_before_the_start(opponent) -> None:
    match = r"steps: N\} with a whole number N of at least 1"
    with pytest.raises(ConfigError, match=match):
        build(TextArenaWorkflow, env="Race-v0", args={"opponent": opponent}).check_rows([ROW])
    with pytest.raises(ConfigError, match=match):
        build(TextArenaWorkflow, env="Race-v0").check_rows([ROW, ROW | {"config": {"opponent": opponent}}, ROW])


def test_a_trained_player_that_a_game_of_two_lacks_is_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match="trained=2"):
        build(TextArenaWorkflow, env="Race-v0", args={"opponent": {"steps": 4}, "trained": 2}).check_rows([ROW])


def test_a_game_that_does_not_exist_is_named_before_the_start() -> None:
    with pytest.raises(ConfigError, match="no game 'Chess'") as error:
        build(TextArenaWorkflow, env="Chess").check_rows([ROW])
    assert error.value.code == "env.not_found"


def guessing(make, **options):
    return make(OpenEnvWorkflow, **{"env": "game.py:app", **options})


@pytest.mark.parametrize(
    ("answers", "reward", "turns"),
    [
        (["5"], 1.0, 1),
        (["1", "5"], 1.0, 2),
        (["one", "5"], 1.0, 2),  # a refused action is an answer of the policy
        (["1", "2", "3"], 0.0, 3),  # no step after the end
    ],
)
async def test_each_step_of_a_session_is_a_turn_with_its_reward(make, answers, reward, turns) -> None:
    group = await guessing(make).arun_episode(scripted(*answers), dict(ROW))
    assert ([trajectory.reward for trajectory in group.trajectories], group.stats["num_turns"]) == ([reward], turns)


async def test_sessions_wait_for_the_capacity_that_the_server_has(make) -> None:
    group = await guessing(make, n_samples=5).arun_episode(policy(lambda _: "5"), dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0] * 5


def test_more_sessions_than_the_server_takes_are_refused_before_the_start() -> None:
    with pytest.raises(ConfigError, match="takes 2 episodes") as error:
        build(OpenEnvWorkflow, env="game.py:app", max_concurrent=3).check_rows([ROW])
    assert error.value.code == "env.capacity"


@pytest.mark.parametrize(("env", "text"), [("http://127.0.0.1:9", "does not answer"), ("none.py", "no FILE.py:APP")])
def test_a_server_that_is_missing_is_one_line(env, text) -> None:
    with pytest.raises(ConfigError, match=text) as error:
        build(OpenEnvWorkflow, env=env).check_rows([ROW])
    assert error.value.code == "env.not_found"


@pytest.mark.parametrize(("answer", "error"), [("99", "EXECUTION_ERROR"), ("98", "JSONDecodeError")])
async def test_a_fault_of_the_server_is_no_reward(make, answer, error) -> None:
    with pytest.raises(AgentFailed, match=error):
        await guessing(make, args={"invalid_reward": -1.0}).arun_episode(policy(lambda _: answer), dict(ROW))


async def test_an_episode_whose_server_was_killed_runs_again_on_a_new_one(make) -> None:
    workflow, killed = guessing(make), []
    await workflow.worker.facts()
    killed.append(await workflow.worker.call("server_pid", {}, limit_s=20))

    def kill_once(_):
        if len(killed) == 1:
            killed.append(os.kill(killed[0], signal.SIGKILL))
        return "5"

    group = await workflow.arun_episode(policy(kill_once), dict(ROW))
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0]
    assert await workflow.worker.call("server_pid", {}, limit_s=20) != killed[0]
