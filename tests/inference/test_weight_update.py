"""A server takes in weights whole or not at all, from a folder and from a broadcast."""

from __future__ import annotations

import json
import os
import threading
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from areal.api.data import WeightSpec
from areal.api.errors import RequestError, WeightSyncError
from areal.inference.weight_update import ServedWeights
from areal.server_side.areal_transfer import group
from areal.system.durable import publish_folder
from areal.system.network import TRAINERS_VARIABLE, Host
from areal.weights.update_group import UpdateGroup, bucket_bytes, bucket_views, check_trainer, serve_store
from tests.expect import raises_code


class TiedModel(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, dtype=dtype)
        self.middle = nn.Linear(4, 4, dtype=dtype)
        self.head = nn.Linear(4, 6, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("counter", torch.zeros(2))


def new_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(6, 4, generator=generator),
        "middle.weight": torch.randn(4, 4, generator=generator),
        "middle.bias": torch.randn(4, generator=generator),
    }


def specs_of(weights: dict[str, torch.Tensor]) -> list[WeightSpec]:
    return [WeightSpec(name=n, shape=list(w.shape), dtype=str(w.dtype)[6:]) for n, w in weights.items()]


def load_weights_from_folder(model: nn.Module, folder: Path) -> None:
    served = ServedWeights(model)
    served.receive_folder(folder)
    install(served)


def install(served: ServedWeights) -> None:
    served.check_complete("")
    served.install()


def test_a_model_with_experts_takes_the_weights_of_its_checkpoints(build_model, tmp_path):
    model, other = build_model("deepseek_v3"), build_model("deepseek_v3")
    with torch.no_grad():
        for value in other.parameters():
            value.mul_(0.5)
    other.save_pretrained(tmp_path)
    load_weights_from_folder(model, tmp_path)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def assert_holds(model: TiedModel, weights: dict[str, torch.Tensor]) -> None:
    dtype = model.embed.weight.dtype
    for name, value in weights.items():
        assert torch.equal(model.state_dict()[name], value.to(dtype)), name
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folder_is_copied_in_place(tmp_path: Path, dtype: torch.dtype) -> None:
    model = TiedModel(dtype)
    before = model.embed.weight
    save_file(new_weights(), tmp_path / "model.safetensors")
    load_weights_from_folder(model, tmp_path)
    assert_holds(model, new_weights())
    assert model.embed.weight is before


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    weights = new_weights()
    names = list(weights)
    save_file({names[0]: weights[names[0]]}, tmp_path / "a.safetensors")
    save_file({n: weights[n] for n in names[1:]}, tmp_path / "b.safetensors")
    save_file({"foreign": torch.zeros(1)}, tmp_path / "stray.safetensors")
    places = dict(zip(names, ["a.safetensors", "b.safetensors", "b.safetensors"], strict=True))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    model = TiedModel()
    load_weights_from_folder(model, tmp_path)
    assert_holds(model, weights)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"middle.bias": None}, "weights.incomplete"),
        ({"middle.bias": torch.zeros(5)}, "weights.do_not_fit"),
        ({"middle.bias": torch.zeros(4, dtype=torch.int32)}, "weights.do_not_fit"),
        ({"middle.bias": torch.tensor([0, 0, 0, torch.nan])}, "weights.not_finite"),
        ({"middle.weight": torch.full((4, 4), torch.inf)}, "weights.not_finite"),
        ({"middle.bias": torch.full((4,), 1e39, dtype=torch.float64)}, "weights.not_finite"),  # inf in float32
        ({"stranger": torch.zeros(1)}, "weights.do_not_fit"),
    ],
)
def test_a_wrong_folder_changes_nothing(tmp_path: Path, change: dict, code: str) -> None:
    weights = {n: w for n, w in (new_weights() | change).items() if w is not None}
    save_file(weights, tmp_path / "model.safetensors")
    model = TiedModel()
    before = {n: w.clone() for n, w in model.state_dict().items()}
    with pytest.raises(RequestError) as error:
        load_weights_from_folder(model, tmp_path)
    assert error.value.code == code
    assert all(torch.equal(w, before[n]) for n, w in model.state_dict().items())


@pytest.mark.parametrize("damaged", [b"", b"\2\0\0\0\0\0\0\0{]", b"\377" * 9])
def test_nothing_is_left_of_files_in_memory_that_cannot_be_used(tmp_path: Path, damaged: bytes) -> None:
    save_file(new_weights(), tmp_path / "whole")
    contents = {"model-1.safetensors": np.fromfile(tmp_path / "whole", np.uint8)}
    contents["model-2.safetensors"] = np.frombuffer(bytearray(damaged), np.uint8)
    served = ServedWeights(TiedModel())
    with raises_code("weights.bad_folder"):
        served.receive_contents(contents)
    with raises_code("weights.incomplete"):
        served.check_complete("")
    del contents["model-2.safetensors"]
    served.receive_contents(contents)
    served.check_complete("")


def test_missing_empty_broken_and_incomplete_folders_are_refused(tmp_path: Path) -> None:
    model = TiedModel()

    def refused(folder: Path) -> bool:
        with pytest.raises(RequestError) as error:
            load_weights_from_folder(model, folder)
        return error.value.code == "weights.bad_folder"

    assert refused(tmp_path / "none")
    assert refused(tmp_path / ("x" * 5000))
    assert refused(Path("bad\0name"))
    assert refused(tmp_path)
    file = tmp_path / "model.safetensors"
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":%s}'
    contents = [b"garbage", header % b"1", header % (b"[" * 2000 + b"]" * 2000), b"[" * 2000]
    contents += [header % b'{"dtype":"X","shape":[1],"data_offsets":[0,Infinity]}']
    for content in contents:
        file.write_bytes(len(content).to_bytes(8, "little") + content + bytes(4))
        assert refused(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert refused(tmp_path)
    file.unlink()
    save_file(new_weights(), file)
    for name in ("COMPLETE", "model.safetensors.index.json"):
        os.mkfifo(tmp_path / name)
        assert refused(tmp_path)
        (tmp_path / name).unlink()
    load_weights_from_folder(model, tmp_path)
    writing = tmp_path / "writing"
    writing.mkdir()
    save_file(new_weights(), writing / "model.safetensors")
    publish_folder(writing, tmp_path / "v1")
    load_weights_from_folder(model, tmp_path / "v1")
    with open(tmp_path / "v1" / "model.safetensors", "r+b") as file:
        file.truncate(20)
    assert refused(tmp_path / "v1")


def test_a_bucket_that_cannot_be_laid_out_is_refused() -> None:
    specs = [WeightSpec(name="b", shape=[3], dtype="bfloat16"), WeightSpec(name="a", shape=[2], dtype="float32")]
    with pytest.raises(RequestError) as order:
        bucket_bytes(specs)
    with pytest.raises(RequestError) as size:
        bucket_views(torch.zeros(13, dtype=torch.uint8), specs[::-1])
    assert [order.value.code, size.value.code] == ["weights.invalid_bucket"] * 2
    views = bucket_views(torch.zeros(14, dtype=torch.uint8), specs[::-1])
    assert {name: view.dtype for name, view in views.items()} == {"a": torch.float32, "b": torch.bfloat16}


class Sender:
    """The trainer's end: rank 0 of a group of two, in a thread."""

    def __init__(self, weights: dict[str, torch.Tensor], receiver: ServedWeights, timeout_s: float = 10) -> None:
        store = serve_store(Host(), "secret", timeout_s=timeout_s)
        joined: list[UpdateGroup] = []
        thread = threading.Thread(
            target=lambda: joined.append(
                UpdateGroup(store, rank=0, world_size=2, group_name="g", backend="gloo", timeout_s=timeout_s)
            )
        )
        thread.start()
        receiver.join("127.0.0.1", store.port, 1, 2, "g", "gloo", timeout_s)
        thread.join()
        self.group = joined[0]
        self.weights = weights

    def send(self) -> threading.Thread:
        specs = specs_of(self.weights)
        buffer = torch.zeros(bucket_bytes(specs), dtype=torch.uint8)
        for name, view in bucket_views(buffer, specs).items():
            view.copy_(self.weights[name])
        thread = threading.Thread(target=self.group.broadcast, args=(buffer,))
        thread.start()
        return thread


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_broadcast_weights_are_copied_in_place(dtype: torch.dtype) -> None:
    model = TiedModel(dtype)
    receiver = ServedWeights(model)
    sender = Sender(new_weights(), receiver)
    for _ in range(2):  # a group lasts over several updates
        thread = sender.send()
        receiver.receive(specs_of(sender.weights))
        thread.join()
        install(receiver)
        assert_holds(model, sender.weights)
        sender.weights = {n: w + 1 for n, w in sender.weights.items()}
    assert receiver.group_name == "g"
    receiver.leave()
    sender.group.close()


def test_an_update_without_all_weights_is_an_error() -> None:
    model = TiedModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    served = ServedWeights(model)
    weights = new_weights()
    del weights["middle.bias"]
    sender = Sender(weights, served)
    thread = sender.send()
    served.receive(specs_of(weights))
    thread.join()
    with pytest.raises(RequestError) as error:
        install(served)
    assert error.value.code == "weights.incomplete"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    served.leave()
    sender.group.close()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broadcast_that_is_not_finite_leaves_the_weights(bad: float) -> None:
    model = TiedModel()
    served = ServedWeights(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sender = Sender(new_weights(), served)
    thread = sender.send()
    served.receive(specs_of(sender.weights))  # the first bucket
    thread.join()
    sender.weights["middle.bias"][2] = bad
    thread = sender.send()
    with pytest.raises(RequestError) as error:
        served.receive(specs_of(sender.weights))
    thread.join()
    assert error.value.code == "weights.not_finite"
    with pytest.raises(RequestError):
        install(served)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sender.group.close()


def test_a_broadcast_error_does_not_keep_the_group_alive() -> None:
    """A destructor that waits, run by the garbage collector, stops a server's event loop for longer than hang_s."""
    receiver = ServedWeights(TiedModel())
    sender = Sender(new_weights(), receiver)
    with pytest.raises(WeightSyncError) as caught:
        sender.group.broadcast(torch.zeros(1 << 26, dtype=torch.uint8), give_up=lambda: True)
    error: BaseException | None = caught.value
    kept: list[object] = []
    while error is not None:
        kept += [value for frame, _ in traceback.walk_tb(error.__traceback__) for value in frame.f_locals.values()]
        error = error.__cause__
    assert any(value is sender.group._group for value in kept), "the frame of the broadcast is seen"
    assert not any(isinstance(value, dist.Work) for value in kept)
    receiver.leave()
    sender.group.close()


def test_a_wrong_spec_leaves_the_group_and_fails_the_sender() -> None:
    receiver = ServedWeights(TiedModel())
    sender = Sender(new_weights(), receiver)
    with pytest.raises(RequestError) as unknown:
        receiver.receive([WeightSpec(name="x", shape=[1], dtype="float32")])
    assert receiver.group_name == ""
    with pytest.raises(RequestError) as left:
        receiver.receive(specs_of(new_weights()))
    with pytest.raises(WeightSyncError) as failed:
        sender.group.broadcast(torch.zeros(1 << 22, dtype=torch.uint8))
    codes = [error.value.code for error in (unknown, left, failed)]
    assert codes == ["weights.do_not_fit", "weights.no_group", "weights.transfer_failed"]


def test_a_receiver_without_a_sender_gives_up() -> None:
    receiver = ServedWeights(TiedModel())
    with pytest.raises(WeightSyncError) as empty:
        receiver.join("127.0.0.1", 9, 1, 2, "g", "gloo", 60)
    store = serve_store(Host(), "secret", timeout_s=1)
    with pytest.raises(WeightSyncError) as alone:
        receiver.join("127.0.0.1", store.port, 1, 2, "g", "gloo", 0.5)
    with pytest.raises(RequestError) as rank:
        receiver.join("127.0.0.1", store.port, 0, 2, "g", "gloo", 0.5)
    codes = [error.value.code for error in (empty, alone, rank)]
    assert codes == ["weights.transfer_failed", "weights.transfer_failed", "weights.no_group"]


def test_one_name_of_a_tied_pair_is_enough() -> None:
    targets = ServedWeights(TiedModel())
    assert targets.missing({"head.weight", "middle.weight", "middle.bias"}) == []
    assert targets.missing({"middle.weight"}) == ["embed.weight", "middle.bias"]


@pytest.mark.parametrize(
    ("addresses", "asked", "is_known"),
    [
        ("", "127.0.0.1", True),
        ("", "127.8.8.8", True),
        ("", "10.0.0.7", False),
        ("", "attacker.example", False),
        ("10.0.0.7, 10.0.0.8", "10.0.0.8", True),
        ("10.0.0.7", "127.0.0.1", False),
        ("10.0.0.7", "10.0.0.70", False),
    ],
)
def test_a_server_joins_groups_of_known_trainers_only(monkeypatch, addresses, asked, is_known):
    monkeypatch.setenv(TRAINERS_VARIABLE, addresses)
    assert group.TRAINERS_VARIABLE == TRAINERS_VARIABLE
    if is_known:
        check_trainer(asked)
        return
    with pytest.raises(RequestError) as error:
        ServedWeights(nn.Linear(1, 1)).join(asked, 1, 1, 2, "group", "gloo", 1.0)
    assert error.value.code == "weights.unknown_trainer"
