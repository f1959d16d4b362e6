"""The extension for servers of LLaVA: importing it adds the names of the vision tower that vLLM 0.32 does not know.

transformers 5 writes `vision_tower.*` where vLLM and older checkpoints have `vision_tower.vision_model.*`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import re

from areal_vllm.extension import WorkerExtension
from vllm.model_executor.models.llava import LlavaForConditionalGeneration
from vllm.model_executor.models.utils import WeightsMapper

__all__ = ["WorkerExtension"]

_NEWER = re.compile(r"^(model\.)?vision_tower\.(?!vision_model\.)")
LlavaForConditionalGeneration.hf_to_vllm_mapper = (
    WeightsMapper(orig_to_new_regex={_NEWER: "vision_tower.vision_model."})
    | LlavaForConditionalGeneration.hf_to_vllm_mapper
)
