"""Owns the modules around a transformers model: packed ids in, one number per token out, never all logits at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from areal.api.batch import TokenOutputs
from areal.engine.micro_batch import ModelInput

MAX_LOGITS = 2**26
"""Logits computed at once (256 MiB in float32); more are cut and computed again in the backward pass."""


class TokenModel(nn.Module, ABC):
    """A transformers model as the engine sees it. `forward` gives plain tensors, since FSDP hooks look for those."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @property
    @abstractmethod
    def num_outputs(self) -> int:
        """How many tensors `forward` gives."""

    @abstractmethod
    def as_outputs(self, values: Sequence[Tensor]) -> TokenOutputs:
        """What `forward` gave, or tensors of that kind for a whole batch, by name."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved buffers by Hugging Face name; of tied ones the first name."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def tied_names(self) -> dict[str, str]:
        """Further names of tied weights -> the name `named_tensors` has."""
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
        return tied

    def _hidden(self, inputs: ModelInput) -> Tensor:
        """Last hidden states, [T, h]. No attention mask and no cache: either would switch packing off silently."""
        outputs = self.model.base_model(
            input_ids=inputs.input_ids.unsqueeze(0),
            position_ids=inputs.position_ids.unsqueeze(0),
            use_cache=False,
            layout=inputs.layout,
        )
        return outputs.last_hidden_state[0]


class PolicyModel(TokenModel):
    """A causal language model that says log-probability and entropy of every next token."""

    def __init__(self, model: PreTrainedModel, temperature: float) -> None:
        super().__init__(model)
        self._temperature = temperature
        self._chunk = max(MAX_LOGITS // model.config.get_text_config().vocab_size, 1)

    @property
    def num_outputs(self) -> int:
        return 2

    def as_outputs(self, values: Sequence[Tensor]) -> TokenOutputs:
        return TokenOutputs(logprobs=values[0], entropy=values[1])

    def forward(self, inputs: ModelInput) -> tuple[Tensor, Tensor]:
        hidden = self._hidden(inputs)
        recompute = hidden.requires_grad and hidden.shape[0] > self._chunk
        parts: list[tuple[Tensor, Tensor]] = []
        for states, labels in zip(hidden.split(self._chunk), inputs.labels.split(self._chunk), strict=True):
            if recompute:
                part = checkpoint(self._next_token, states, labels, use_reentrant=False)
                parts.append(cast("tuple[Tensor, Tensor]", part))
            else:
                parts.append(self._next_token(states, labels))
        logprobs, entropy = (torch.cat(column) for column in zip(*parts, strict=True))
        return torch.where(inputs.has_label, logprobs, 0.0), torch.where(inputs.has_label, entropy, 0.0)

    def _next_token(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [t, h], labels [t] -> log-probability of each label and entropy without gradient, [t] float32."""
        head = cast("nn.Linear", self.model.get_output_embeddings())
        logits = head(hidden).float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        distribution = F.log_softmax(logits, dim=-1)
        logprobs = distribution.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)
        return logprobs, entropy


class ValueModel(TokenModel):
    """A backbone with a one-output head `score` that computes in float32."""

    @property
    def num_outputs(self) -> int:
        return 1

    def as_outputs(self, values: Sequence[Tensor]) -> TokenOutputs:
        return TokenOutputs(values=values[0])

    def forward(self, inputs: ModelInput) -> tuple[Tensor]:
        values = self.model.get_submodule("score")(self._hidden(inputs).float()).squeeze(-1)
        return (torch.where(inputs.has_label, values, 0.0),)
