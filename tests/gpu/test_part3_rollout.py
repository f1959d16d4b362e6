"""Part 3: sampling, log-probabilities of rollout and trainer, groups of NCCL that cannot form."""

import inspect
import multiprocessing
import time

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from areal.server_side.areal_transfer import group
from areal.system.network import Host
from areal.weights.update_group import serve_store
from tests.gpu import bodies

pytestmark = pytest.mark.gpu


def test_ten_million_draws_choose_no_token_of_weight_zero(gpu):
    zeros, deviation = bodies.draws_of_weight_zero(gpu, draws=10_000_000, vocabulary=10_000)
    assert zeros == 0
    assert deviation < 5


@pytest.mark.parametrize("head_dtype", ["compute", "float32"])
def test_rollout_and_trainer_agree(gpu, tmp_path, head_dtype):
    bodies.write_model(tmp_path, hidden=1024, layers=8, vocabulary=32_000)
    result = bodies.rollout_difference(gpu, tmp_path, head_dtype=head_dtype, sequences=64, new_tokens=256)
    print(f"{torch.cuda.get_device_name()}, head {head_dtype}: {result}")  # noqa: T201
    assert result.mean < (0.05 if head_dtype == "compute" else 0.03)


def test_cuda_graphs_give_the_logits_of_steps_without_them(gpu, tmp_path):
    """Also on the CPU, with a kernel and a capture of the tests: tests/inference/test_paged_kernel.py."""
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        pytest.skip(f"torch {torch.__version__} has no kernel for paged caches, so decode steps are no graphs")
    bodies.write_model(tmp_path, hidden=1024, layers=8, vocabulary=32_000)
    was_used, worst = bodies.graph_difference(gpu, tmp_path, sequences=13, new_tokens=128)
    print(f"{torch.cuda.get_device_name()}, decode graphs: largest difference {worst:.2e} nats")  # noqa: T201
    assert was_used
    assert worst < 0.1


def test_a_group_of_one_broadcasts(gpu):
    store = serve_store(Host(), "secret", timeout_s=60)
    made = group.meet(store, rank=0, world_size=1, group_name="g", backend="nccl", timeout_s=60)
    group.broadcast(made, torch.ones(1000, dtype=torch.uint8, device=gpu), 60)
    group.leave(made)


def test_a_group_where_nobody_comes_ends_in_an_error(gpu):
    store = serve_store(Host(), "secret", timeout_s=60)
    made = group.meet(store, rank=0, world_size=2, group_name="g", backend="nccl", timeout_s=20)
    start_s = time.monotonic()
    with pytest.raises(group.TransferError):
        group.broadcast(made, torch.ones(1000, dtype=torch.uint8, device=gpu), 10)
    assert time.monotonic() - start_s < 20
    group.leave(made)


def _second_rank(port: int, answers: multiprocessing.Queue) -> None:
    try:
        made = group.connect("127.0.0.1", port, rank=1, world_size=2, group_name="g", backend="nccl", timeout_s=30)
        group.broadcast(made, torch.zeros(1000, dtype=torch.uint8, device="cuda"), 30)
        answers.put("received")
    except group.TransferError as error:
        answers.put(f"error {error}")


def test_two_processes_on_one_card_get_an_error_and_live(gpu):
    """NCCL refuses a GPU that two ranks share."""
    store = serve_store(Host(), "secret", timeout_s=60)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    peer = context.Process(target=_second_rank, args=(store.port, answers))
    peer.start()

    def send() -> None:
        made = group.meet(store, rank=0, world_size=2, group_name="g", backend="nccl", timeout_s=30)
        group.broadcast(made, torch.ones(1000, dtype=torch.uint8, device=gpu), 30)

    with pytest.raises(group.TransferError):
        send()
    assert answers.get(timeout=120).startswith("error")
    peer.join(60)
    assert peer.exitcode == 0, "an error, no abort"


@pytest.mark.parametrize("kind", sorted(bodies.QUANTIZED_LIMITS))
def test_products_of_quantised_weights(gpu, kind):
    result = bodies.quantized_error(gpu, kind)
    print(f"{torch.cuda.get_device_name()}, {kind}: largest error {result:.4f} of the largest output")  # noqa: T201
    assert 0 < result < bodies.QUANTIZED_LIMITS[kind]
