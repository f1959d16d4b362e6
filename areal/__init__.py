"""areal: fully asynchronous reinforcement learning for language models.

The names that scripts need can be imported from here. Their modules, and torch, are loaded at the first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.api.config import DPOConfig as DPOConfig
    from areal.api.config import GRPOConfig as GRPOConfig
    from areal.api.config import PPOConfig as PPOConfig
    from areal.api.config import RWConfig as RWConfig
    from areal.api.config import SFTConfig as SFTConfig
    from areal.api.config import load_config as load_config
    from areal.api.data import GenerationRequest as GenerationRequest
    from areal.api.data import Trajectory as Trajectory
    from areal.api.data import TrajectoryGroup as TrajectoryGroup
    from areal.api.workflow import RolloutWorkflow as RolloutWorkflow
    from areal.data.dataset import load_pairs as load_pairs
    from areal.data.dataset import load_rows as load_rows
    from areal.data.dataset import load_sft_rows as load_sft_rows
    from areal.data.tokenizer import tokenizer_of as tokenizer_of
    from areal.serve.client import Client as Client
    from areal.serve.client import datum as datum
    from areal.trainer.ppo import PPOTrainer as PPOTrainer
    from areal.trainer.reward_model import RewardModelTrainer as RewardModelTrainer
    from areal.trainer.supervised import DPOTrainer as DPOTrainer
    from areal.trainer.supervised import SFTTrainer as SFTTrainer
    from areal.workflow.conversation import ConversationWorkflow as ConversationWorkflow
    from areal.workflow.registry import build_workflow as build_workflow
    from areal.workflow.rlvr import RLVRWorkflow as RLVRWorkflow

__version__ = "0.1.0"

_MODULES = {
    "areal.api.config": "DPOConfig GRPOConfig PPOConfig RWConfig SFTConfig load_config",
    "areal.api.data": "GenerationRequest Trajectory TrajectoryGroup",
    "areal.api.workflow": "RolloutWorkflow",
    "areal.data.dataset": "load_pairs load_rows load_sft_rows",
    "areal.data.tokenizer": "tokenizer_of",
    "areal.serve.client": "Client datum",
    "areal.trainer.ppo": "PPOTrainer",
    "areal.trainer.reward_model": "RewardModelTrainer",
    "areal.trainer.supervised": "DPOTrainer SFTTrainer",
    "areal.workflow.conversation": "ConversationWorkflow",
    "areal.workflow.registry": "build_workflow",
    "areal.workflow.rlvr": "RLVRWorkflow",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'areal' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULE_OF]
