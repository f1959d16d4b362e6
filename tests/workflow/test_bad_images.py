"""Rows with unusable images fail their own episodes; the others are trained on, and the run keeps no other files."""

from pathlib import Path

import pytest

from areal.api.config import GenerationHyperparameters
from areal.data.image_files import ImageFiles
from areal.data.prompt_stream import PromptStream
from areal.ledger.audit import audit
from areal.ledger.event_files import LedgerReader
from areal.ledger.ledger import Ledger
from areal.rollout.controller import Controller
from areal.workflow.rlvr import VisionRLVRWorkflow
from tests.data.test_image_files import claiming
from tests.data.test_images import TOKENIZER, images_for, png, user
from tests.expect import raises_code
from tests.rollout import rollout_kit

BAD = {
    "data.image_broken": {"messages": user("<image>"), "images": [png()[:-40]]},
    "data.image_too_large": {"messages": user("<image>"), "images": [claiming(40_000, 40_000)]},
    "data.image_not_found": {"messages": user("<image>"), "images": ["absent.png"]},
    "data.too_many_images": {"messages": user("<image>" * 4), "images": [png()] * 4},
    "data.image_tokens": {"messages": user("<image><image>"), "images": [png()]},
    "data.invalid_column": {"messages": user("<image>"), "images": [5]},
}
GOOD = [{"messages": user("<image>a"), "images": [png(colour=number)]} for number in range(6)]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
async def test_each_bad_row_fails_alone_and_nothing_is_lost(tmp_path):
    sampling = GenerationHyperparameters(n_samples=1, max_new_tokens=2, temperature=1e-3)
    reward = f"{Path(__file__).parent / 'reward_for_rlvr.py'}:always_one"
    workflow = VisionRLVRWorkflow(reward, sampling, TOKENIZER, images_for(tmp_path, max_images=3))
    fleet, files = rollout_kit.FakeFleet(), ImageFiles(tmp_path / "images")
    for code, row in BAD.items():
        with raises_code(code):
            await workflow.arun_episode(fleet, row)
    assert not files.unreachable(())
    ledger = Ledger.open(tmp_path / "ledger")
    ledger.start(pytest.fail)
    stream = PromptStream([row for pair in zip(GOOD, BAD.values(), strict=True) for row in pair], seed=1, batch_size=2)
    controller = Controller(
        rollout_kit.make_config(batch_size=2), fleet=fleet, workflow=workflow, rows=stream, ledger=ledger, total_steps=6
    )
    await controller.start()
    await controller.attach(rank=0, world_size=1, dp_size=1, step=0, version=0)
    await rollout_kit.train(controller, range(6))
    await controller.close()
    await workflow.aclose()
    assert audit(tmp_path / "ledger").is_clean
    ended: dict[str, set[int]] = {"accepted": set(), "failed": set()}
    for event in LedgerReader(tmp_path / "ledger").events():
        if event["event"] in ended:
            ended[event["event"]].add(event["id"])
    assert len(ended["accepted"]) >= 12
    assert all(stream.row(number) in GOOD for number in ended["accepted"])
    assert ended["failed"]
    assert all(stream.row(number) in BAD.values() for number in ended["failed"])
    assert len(files.unreachable(())) == len(GOOD)
