"""RL with verifiable rewards on rows with images."""

from typing import Any

from areal.api.config import GenerationHyperparameters, RewardConfig
from areal.api.errors import ConfigError
from areal.api.images import ImageRef
from areal.api.workflow import RewardFn
from areal.data.chat import EncodedPrompt, encode_prompt
from areal.data.images import PromptImages
from areal.data.tokenizer import Tokenizer
from areal.workflow.rlvr import RLVRWorkflow


class VisionRLVRWorkflow(RLVRWorkflow):
    """As `RLVRWorkflow`, with the images of a row (docs/vision.md). Rows without images may be mixed in.

    Reward functions get all columns except that of the images.
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Tokenizer,
        images: PromptImages | None,
        *,
        reward: RewardConfig | None = None,
        enable_thinking: bool = False,
        greedy_baseline: bool = False,
    ) -> None:
        if images is None:
            text = "workflow=vision_rlvr: the model takes no images, or has no preprocessor_config.json"
            raise ConfigError(f"{text}; use workflow=rlvr for a model of text", code="model.image_processor")
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            reward=reward,
            enable_thinking=enable_thinking,
            greedy_baseline=greedy_baseline,
        )
        self._images = images

    def prompt(self, row: dict[str, Any]) -> EncodedPrompt:
        return encode_prompt(row, self.tokenizer, enable_thinking=self.enable_thinking, images=self._images)

    async def _stored_images(self, prompt: EncodedPrompt) -> tuple[ImageRef, ...]:
        return await self._images.stored(prompt.images)

    def _scored_row(self, row: dict[str, Any]) -> dict[str, Any]:
        return self._images.without_images(row)
