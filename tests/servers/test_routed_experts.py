"""A real SGLang returns the experts that it chose; a trainer that replays them has its log-probabilities."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from areal.api.columns import ROUTED_EXPERTS, ExpertShape, RoutedExperts
from areal.api.config import TrainEngineConfig
from areal.api.data import Trajectory
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh
from areal.fleet.fleet import Answer
from areal.fleet.replica import AnswerForm
from areal.fleet.sglang import SGLangReplica
from areal.ledger.payload import encode_unscored, table_of
from tests.fleet.generation_parts import Chunks
from tests.servers.checkpoints import EOS, VOCAB_SIZE, build_tokenizer
from tests.servers.real_server import RealServer
from tests.servers.server_kit import PROMPT, TOLERANCE, a_request

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
SHAPE = ExpertShape(2, 2, 8)


def write_sparse(folder: Path) -> Path:
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=1024, num_experts=8,
        num_experts_per_tok=2, initializer_range=0.2, pad_token_id=0, eos_token_id=EOS, bos_token_id=None,
        dtype="float32",
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


async def test_the_trainer_replays_what_sglang_chose(tmp_path: Path) -> None:
    model = write_sparse(tmp_path / "model")
    server = RealServer("sglang", model, tmp_path, flags={"enable_return_routed_experts": True})
    try:
        form = AnswerForm(stream_interval=8, experts=SHAPE)
        replica = SGLangReplica("server-0", server.wait_ready().address, form=form)
        answer = Answer(a_request(20), form)
        while answer.stop_reason is None:
            for chunk in await Chunks().collect(replica, answer.next_part("server-0")):
                answer.add(chunk)
            answer.end_part()
        await replica.close()
    finally:
        server.kill_all()
    response = answer.response()
    row = [*PROMPT, *response.output_ids]
    record = response.routed_experts
    assert record is not None
    assert len(record) == len(row) - 1
    assert 255 not in record.data
    whole = RoutedExperts.joined([record, RoutedExperts.unknown(SHAPE, 1)])
    trajectory = Trajectory(
        token_ids=row, loss_mask=[1] * len(row), rollout_logprobs=[0.0] * len(row), output_versions=[0] * len(row),
        reward=0.0, finished=True, columns={ROUTED_EXPERTS: whole.array},
    )  # fmt: skip
    experts = table_of(encode_unscored(0, [trajectory])).columns[ROUTED_EXPERTS]
    batch = rows_to_train_batch([row], [[0] + [1] * (len(row) - 1)]).with_column(ROUTED_EXPERTS, torch.tensor(experts))
    config = TrainEngineConfig(path=str(model), dtype="float32", router_replay=True)
    engine = build_fsdp_engine(config, role="ref", total_steps=1, mesh=TrainerMesh.open(None), seed=0)
    actual = engine.forward(batch).logprobs
    assert actual is not None
    expected = torch.tensor(list(response.output_logprobs))
    torch.testing.assert_close(actual[len(PROMPT) - 1 : -1], expected, rtol=0, atol=TOLERANCE)
