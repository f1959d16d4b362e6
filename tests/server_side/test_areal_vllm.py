"""areal's part in a vLLM worker, over a stand-in for vLLM: whole updates, failed ones, and what is said of them."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from areal.server_side import FOLDER

A, B = TypeVar("A"), TypeVar("B")
BUCKET = {"names": ["q", "k"], "dtype_names": ["float32", "float32"], "shapes": [[2], [1]]}
LAST = {"names": ["head"], "dtype_names": ["bfloat16"], "shapes": [[2]]}


@dataclass
class LayerInfo:
    load_numel: int = 0
    load_numel_total: int = 0
    kernel_non_persistent_buffers: set[str] = field(default_factory=set)

    def can_load(self) -> bool:
        return self.load_numel_total > 0


class Model(nn.Module):
    """q and k make one parameter, as vLLM fuses them; the head is another. A scale is computed from the weights, so it
    is in no checkpoint; a reload has the parameters of a checkpoint until it is finalized."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.qk = nn.Parameter(torch.zeros(3))  # type: ignore[assignment]
        self.attention.scale = nn.Parameter(torch.ones(1))  # type: ignore[assignment]
        self.head = nn.Parameter(torch.zeros(2))
        self.events: list[str] = []
        self.fails_on = ""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded: set[str] = set()
        for name, value in weights:
            if name == self.fails_on:
                raise ValueError(f"no room for {name}")
            self.events.append(f"{name}={value.float().tolist()}")
            STAND_IN.infos.setdefault(self.attention, LayerInfo()).load_numel += value.numel() * (name in "qk")
            loaded.add("head" if name == "head" else "attention.qk")
        return loaded


@dataclass
class StandIn:
    infos: dict[nn.Module, LayerInfo] = field(default_factory=dict)

    def initialize(self, model: Model) -> None:
        model.events.append("initialize")
        self.infos.clear()
        self.infos[model.attention] = LayerInfo(load_numel_total=3)
        model.attention.register_parameter("scale", None)

    def finalize(self, model: Model, config: Any) -> None:
        model.events.append("finalize")
        model.attention.scale = nn.Parameter(torch.ones(1))
        self.infos.clear()


STAND_IN = StandIn()


class BaseEngine(Generic[A, B]):
    init_info_cls: Any
    update_info_cls: Any

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.vllm_config = vllm_config
        self.parallel_config = vllm_config.parallel_config
        self.model_config = vllm_config.model_config
        self.device = device
        self.model = model

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)

    def start_weight_update(self) -> None: ...
    def finish_weight_update(self) -> None: ...


class Factory:
    def __init__(self) -> None:
        self._registry: dict[str, Any] = {}

    def register_engine(self, name: str, engine: Any) -> None:
        assert name not in self._registry
        self._registry[name] = engine


def stand_in_modules() -> dict[str, ModuleType]:
    factory, base = Factory(), BaseEngine
    info = type("Info", (), {})
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.config": {"set_current_vllm_config": lambda config: contextlib.nullcontext()},
        "vllm.distributed": {},
        "vllm.distributed.weight_transfer": {"WeightTransferEngineFactory": factory},
        "vllm.distributed.weight_transfer.base": {
            "WeightTransferEngine": base,
            "WeightTransferInitInfo": info,
            "WeightTransferUpdateInfo": info,
        },
        "vllm.model_executor": {},
        "vllm.model_executor.model_loader": {},
        "vllm.model_executor.model_loader.reload": {
            "initialize_layerwise_reload": STAND_IN.initialize,
            "finalize_layerwise_reload": STAND_IN.finalize,
        },
        "vllm.model_executor.model_loader.reload.layerwise": {
            "get_layerwise_info": lambda layer: STAND_IN.infos.get(layer, LayerInfo())
        },
    }
    modules: dict[str, ModuleType] = {}
    for name, members in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(members)
    return modules


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The stand-in can be imported, and what is imported over it is forgotten again."""
    modules = stand_in_modules()
    monkeypatch.syspath_prepend(str(FOLDER))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield modules
    for name in [name for name in sys.modules if name.split(".")[0] in ("areal_vllm", "areal_transfer")]:
        del sys.modules[name]


class Worker:
    """As much of vLLM's worker as the extension touches; `make_worker` mixes the extension in."""

    def __init__(self, engine: Any) -> None:
        self.weight_transfer_engine = engine
        self.vllm_config = engine.vllm_config
        self.model_config = engine.model_config
        self._weight_update_active = False
        self.fails_to_reload = False

    def start_weight_update(self) -> None:
        assert not self._weight_update_active
        self.weight_transfer_engine.start_weight_update()
        self._weight_update_active = True

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        engine = self.weight_transfer_engine
        engine.init_transfer_engine(engine.init_info_cls(**info))

    def update_weights(self, bucket: dict[str, Any]) -> None:
        assert self._weight_update_active
        try:
            self.weight_transfer_engine.update_weights(bucket)
        except BaseException:
            self._weight_update_active = False
            raise

    def finish_weight_update(self) -> None:
        self.weight_transfer_engine.finish_weight_update()
        self._weight_update_active = False

    def reload_weights(self, weights_path: str) -> None:
        self.weight_transfer_engine.model.events.append(f"reload {weights_path}")
        if self.fails_to_reload:
            raise ValueError("bad folder")


class Kit:
    """A worker, its engine and a trainer's broadcasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load_format: str = "auto") -> None:
        self.transfer = importlib.import_module("areal_vllm.transfer")
        extension = importlib.import_module("areal_vllm.extension")
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=0, world_size=2, rank=1),
            model_config=SimpleNamespace(model="first", quantization=None, max_model_len=64, get_vocab_size=lambda: 16),
            load_config=SimpleNamespace(load_format=load_format),
        )
        self.model = Model()
        self.engine = self.transfer.ArealTransferEngine(None, config, torch.device("cpu"), self.model)
        self.worker: Any = type("Mixed", (Worker, extension.WorkerExtension), {})(self.engine)
        self.joined: list[dict[str, Any]] = []
        self.left: list[str] = []
        self.fails_to_send = False
        self.factor = 1.0
        monkeypatch.setenv("AREAL_TRAINER_ADDRESSES", "host")
        monkeypatch.setattr(self.transfer.update_group, "connect", self._connect)
        monkeypatch.setattr(self.transfer.update_group, "broadcast", self._broadcast)
        monkeypatch.setattr(self.transfer.update_group, "leave", lambda group: self.left.append(group))

    def _connect(self, host: str, port: int, **settings: Any) -> str:
        self.joined.append({"host": host, "port": port, **settings})
        return settings["group_name"]

    def _broadcast(self, group: str, buffer: Tensor, timeout_s: float) -> None:
        if self.fails_to_send:
            raise RuntimeError("Connection closed by peer")
        width = torch.bfloat16 if buffer.numel() == 4 else torch.float32
        numbers = torch.arange(1.0, 1 + buffer.numel() // width.itemsize, dtype=width)
        buffer.copy_((numbers * self.factor).view(torch.uint8))

    def join(self, name: str = "g1") -> None:
        info = {"master_address": "host", "master_port": 5, "rank_offset": 3, "world_size": 5}
        must(self.worker.areal_join(info | {"group_name": name, "backend": "gloo", "timeout_s": 9.0}))

    def update(self, *buckets: dict[str, Any]) -> None:
        must(self.worker.areal_start_update())
        for bucket in buckets:
            must(self.worker.areal_receive(bucket))
        must(self.worker.areal_finish_update())

    @property
    def is_whole(self) -> bool:
        return self.worker.areal_state()["weights_whole"]


def must(outcome: dict[str, str]) -> None:
    """What the adapter makes of a worker's answer."""
    if outcome:
        raise RuntimeError(outcome["error"])


@pytest.fixture
def kit(vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> Kit:
    return Kit(monkeypatch)


def test_the_import_registers_the_engine(vllm: dict[str, ModuleType], kit: Kit) -> None:
    registry = vars(vllm["vllm.distributed.weight_transfer"])["WeightTransferEngineFactory"]._registry
    assert registry == {"areal": kit.transfer.ArealTransferEngine}
    kit.transfer.register()  # again, as in a process of several workers


def test_an_incompatible_vllm_is_refused_with_both_versions(vllm: dict[str, ModuleType]) -> None:
    vars(vllm["vllm"])["__version__"] = "0.20.1"
    del vars(vllm["vllm.model_executor.model_loader.reload"])["finalize_layerwise_reload"]
    with pytest.raises(ImportError, match=r"\b0\.20\.1 .*finalize_layerwise_reload.* vllm>=0\.32\.0"):
        importlib.import_module("areal_vllm.extension")


def test_each_worker_takes_its_rank_and_leaves_the_previous_group(kit: Kit) -> None:
    kit.join("g1")
    kit.join("g2")
    assert kit.left == ["g1"]
    expected = {"rank": 4, "world_size": 5, "group_name": "g2", "backend": "gloo", "timeout_s": 9.0}
    assert kit.joined[1] == {"host": "host", "port": 5, **expected}
    kit.engine.shutdown()
    kit.engine.shutdown()
    assert kit.left == ["g1", "g2"]


def test_weights_are_complete_only_after_the_last_bucket(kit: Kit) -> None:
    kit.join()
    must(kit.worker.areal_start_update())
    assert not kit.is_whole
    must(kit.worker.areal_receive(BUCKET))
    must(kit.worker.areal_receive(LAST))
    assert not kit.is_whole
    must(kit.worker.areal_finish_update())
    assert kit.is_whole
    assert kit.model.events == ["initialize", "q=[1.0, 2.0]", "k=[3.0]", "head=[1.0, 2.0]", "finalize"]


@pytest.mark.parametrize(
    ("buckets", "lacking"),
    [
        ([BUCKET], "head"),
        ([{"names": ["q"], "dtype_names": ["float32"], "shapes": [[2]]}, LAST], "attention"),
        ([], "attention.qk"),
    ],
    ids=["a parameter", "a piece of one", "all"],
)
def test_an_update_that_lacks_a_weight_is_reported(kit: Kit, buckets: list[dict[str, Any]], lacking: str) -> None:
    kit.join()
    with pytest.raises(RuntimeError, match=rf"\b{lacking}\b"):
        kit.update(*buckets)
    assert not kit.is_whole
    assert kit.model.events[-1] == "finalize"  # the server must live on
    kit.update(BUCKET, LAST)
    assert kit.is_whole


def test_a_failed_bucket_restores_the_weights_and_leaves_the_group(kit: Kit) -> None:
    kit.join()
    kit.fails_to_send = True
    with pytest.raises(RuntimeError, match="closed by peer"):
        kit.update(BUCKET, LAST)
    assert kit.model.events == ["initialize", "finalize"]
    assert (kit.is_whole, kit.left) == (False, ["g1"])
    kit.fails_to_send = False
    with pytest.raises(RuntimeError):  # the group was left
        kit.update(BUCKET, LAST)
    assert (kit.is_whole, kit.joined[1:]) == (False, [])
    kit.join("g2")
    kit.model.fails_on = "head"
    with pytest.raises(RuntimeError, match="no room"):
        kit.update(BUCKET, LAST)
    kit.model.fails_on = ""
    kit.join("g3")
    kit.update(BUCKET, LAST)
    assert kit.is_whole


def test_a_bucket_that_is_not_finite_is_not_loaded(kit: Kit) -> None:
    kit.join()
    kit.factor = torch.nan
    must(kit.worker.areal_start_update())
    assert list(kit.worker.areal_receive(BUCKET)) == ["error"]
    assert kit.model.events == ["initialize", "finalize"]
    assert (kit.is_whole, kit.left) == (False, ["g1"])


def test_a_folder_that_is_not_finite_is_not_loaded(kit: Kit, tmp_path: Path) -> None:
    save_file({"q": torch.tensor([1.0, torch.inf])}, tmp_path / "model.safetensors")
    assert list(kit.worker.areal_load_folder(str(tmp_path))) == ["error"]
    assert (kit.model.events, kit.is_whole) == ([], True)


def test_an_unfinished_update_ends_before_the_next_one(kit: Kit) -> None:
    """The controller died between two buckets: vLLM would refuse to start, and count the first half twice."""
    kit.join()
    must(kit.worker.areal_start_update())
    must(kit.worker.areal_receive(BUCKET))
    kit.update(BUCKET, LAST)
    assert kit.model.events.count("finalize") == 2
    assert kit.model.events.index("finalize") < kit.model.events.index("initialize", 1)
    assert kit.is_whole


def test_a_bad_folder_is_reported_and_a_good_one_makes_the_weights_whole(kit: Kit) -> None:
    kit.worker.fails_to_reload = True
    assert kit.worker.areal_load_folder("v1") == {"error": "bad folder"}  # one that raises sets vLLM's workers apart
    assert kit.model.events == ["reload v1", "finalize"]
    assert not kit.is_whole
    kit.worker.fails_to_reload = False
    must(kit.worker.areal_load_folder("v2"))
    assert kit.is_whole


def test_loading_a_folder_ends_an_unfinished_update(kit: Kit) -> None:
    kit.join()
    must(kit.worker.areal_start_update())
    must(kit.worker.areal_load_folder("v1"))
    assert kit.model.events == ["initialize", "finalize", "reload v1"]
    assert kit.is_whole
    kit.update(BUCKET, LAST)
    assert kit.is_whole


def test_random_first_weights_are_reported_and_replaced_by_files(
    vllm: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = Kit(monkeypatch, load_format="dummy")
    state = kit.worker.areal_state()
    assert (state["has_dummy_weights"], state["first_folder"], state["vocab_size"]) == (True, "first", 16)
    must(kit.worker.areal_load_folder("v1"))
    assert kit.worker.vllm_config.load_config.load_format == "auto"  # vLLM's loader of dummies reads no files


def test_an_output_layer_tied_to_the_embedding_is_packed_again(kit: Kit) -> None:
    """vLLM packs only the layer that was loaded; the other would compute with the old weights."""
    packed: list[str] = []

    def layer(name: str, **marks: Any) -> nn.Module:
        made = nn.Module()
        vars(made).update(
            marks, quant_method=SimpleNamespace(process_weights_after_loading=lambda _: packed.append(name))
        )
        return made

    kit.model.add_module("embedding", layer("embedding", num_embeddings_padded=64, cpu_linear=print))
    kit.model.add_module("output", layer("output", num_embeddings_padded=64, cpu_linear=print))
    kit.model.add_module("linear", layer("linear", cpu_linear=print))
    kit.join()
    kit.update(BUCKET, LAST)
    assert packed == ["embedding", "output"]
    packed.clear()
    must(kit.worker.areal_load_folder("v1"))
    assert packed == ["embedding", "output"]


def test_a_worker_without_the_transfer_engine_names_the_missing_flag(kit: Kit) -> None:
    kit.worker.weight_transfer_engine = None
    with pytest.raises(RuntimeError, match="--weight-transfer-config"):
        kit.worker.areal_state()
