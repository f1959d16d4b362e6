"""Modules around a transformers model: packed token ids in, a few numbers per token out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from transformers.modeling_utils import PreTrainedModel

from areal.api.batch import OutputSpec, TokenOutputs
from areal.api.errors import ConfigError
from areal.engine.hf_model import logits_rule
from areal.engine.linear_logprobs import liger_logprobs, linear_logprobs
from areal.engine.lora import LoRALinear
from areal.engine.mesh import RankGroup
from areal.engine.micro_batch import ModelInput
from areal.engine.packed_attention import all_tokens
from areal.engine.vision import embedded
from areal.models.stored_form import StoredForm

_NEVER = -1e30
"""Logit of a banned token: finite, so that its part of an entropy is 0 and no number is undefined."""


class TokenModel(nn.Module, ABC):
    """A transformers model as the engine uses it. `forward` returns plain tensors because FSDP hooks look for those."""

    needs_last: ClassVar[bool] = False
    """Whether there is an output at the last token of a sequence."""

    def __init__(self, model: PreTrainedModel, spec: OutputSpec | None = None) -> None:
        """`spec`: outputs besides log-probabilities."""
        super().__init__()
        self.model = model
        self.form = StoredForm(model)
        self.spec = spec or OutputSpec()
        self.offloads_activations = False
        """Whether what autograd keeps of the blocks is in CPU memory until the backward pass."""

    def forward(self, inputs: ModelInput) -> tuple[Tensor, ...]:
        """The outputs of every token of the row, also of those that other context ranks compute."""
        outputs, layout = self._outputs(inputs), inputs.layout
        if inputs.tree is not None:
            return tuple(_of_rows(values, inputs.tree.rows) for values in outputs)
        if layout.context is None:
            return outputs
        return tuple(all_tokens(values, layout.context, layout.num_tokens) for values in outputs)

    @abstractmethod
    def _outputs(self, inputs: ModelInput) -> tuple[Tensor, ...]: ...

    @abstractmethod
    def as_outputs(self, values: Sequence[Tensor]) -> TokenOutputs:
        """Name the tensors that `forward` returned, or their counterparts of a whole batch."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and saved buffers by their name in the model; tied ones under their first name."""
        seen: set[int] = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def tied_names(self) -> dict[str, str]:
        """Other names of tied weights -> the name in `named_tensors`."""
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if first.setdefault(id(tensor), name) != name:
                tied[name] = first[id(tensor)]
        return tied

    def _hidden(self, inputs: ModelInput) -> Tensor:
        """Last hidden states, [T, h]. No attention mask and no cache: either would disable packing silently."""
        offloads = self.offloads_activations and self.training
        with save_on_cpu(pin_memory=inputs.input_ids.is_cuda) if offloads else nullcontext():
            tokens: dict[str, Any] = {"input_ids": inputs.input_ids.unsqueeze(0)}
            if inputs.images is not None:
                values, more = embedded(
                    self.model, self.model.get_input_embeddings()(tokens["input_ids"]), inputs.images
                )
                tokens = {"inputs_embeds": values, **more}
            outputs = self.model.get_decoder()(
                **tokens, position_ids=inputs.position_ids.unsqueeze(-2), use_cache=False, layout=inputs.layout
            )
        hidden = outputs.last_hidden_state[0]
        return hidden if inputs.tree is None else F.embedding(inputs.tree.heads, hidden)  # fast in both directions


def _of_rows(values: Tensor, rows: Tensor) -> Tensor:
    """[E, ...] -> [T, ...]. As an embedding, because the backward pass of an index adds one row at a time."""
    if not values.requires_grad:
        return values[rows]
    return F.embedding(rows, values.flatten(1) if values.ndim > 1 else values[:, None]).view(-1, *values.shape[1:])


class PolicyModel(TokenModel):
    """A causal language model that returns log-probability and entropy of every next token, and what its spec adds."""

    def __init__(
        self,
        model: PreTrainedModel,
        temperature: float,
        spec: OutputSpec | None = None,
        *,
        with_liger: bool = False,
        float32_head: bool = False,
        tensor_ranks: RankGroup | None = None,
        banned_ids: Sequence[int] = (),
    ) -> None:
        """`with_liger`: log-probabilities by `liger_logprobs` at temperature 1, without entropies. `float32_head`: the
        logits are not rounded to the compute type. `tensor_ranks`: those with the other parts of the vocabulary.
        `banned_ids`: tokens that are never sampled, with probability 0; where one is the label, all outputs are 0."""
        super().__init__(model, spec)
        rule = logits_rule(model)
        if rule.softcap is not None and (with_liger or banned_ids):
            message = f"{type(model).__name__} caps its logits, which works neither with liger nor with banned tokens"
            raise ConfigError(message, code="model.unsupported")
        self._factor = rule.factor
        self._softcap = None if rule.softcap is None else rule.softcap / rule.factor
        self._temperature = temperature / self._factor
        self._with_liger = with_liger
        self._float32_head = float32_head
        self._tensor_ranks = tensor_ranks
        self._banned_ids = list(banned_ids)

    def as_outputs(self, values: Sequence[Tensor]) -> TokenOutputs:
        return policy_outputs(self.spec, values)

    def _outputs(self, inputs: ModelInput) -> tuple[Tensor, ...]:
        # The head is not called as a module: its parameters belong to the outermost FSDP unit, this one, and are whole
        # during this call. The custom function passes their gradients to autograd, where FSDP looks for them.
        head = cast("nn.Linear", self.model.get_output_embeddings())
        weight = head.effective_weight() if isinstance(head, LoRALinear) else _of_tensor_rank(head.weight)
        bias = None if head.bias is None else _of_tensor_rank(head.bias)
        hidden, valid = self._hidden(inputs).to(weight.dtype), inputs.has_label  # some residuals are float32
        if self._banned_ids:
            bias = self._bias(weight, bias)
            valid = valid & ~torch.isin(inputs.labels, inputs.labels.new_tensor(self._banned_ids))
        if self._with_liger and inputs.temperatures is None:
            bias = None if bias is None else bias * self._factor
            return (liger_logprobs(hidden * self._factor, weight, bias, inputs.labels, valid=valid),)
        outputs = linear_logprobs(
            hidden,
            weight,
            bias,
            inputs.labels,
            temperature=self._temperature_of(inputs),
            outputs=self.spec,
            candidate_ids=inputs.candidate_ids,
            valid=valid,
            softcap=self._softcap,
            float32_head=self._float32_head,
            tensor_ranks=self._tensor_ranks,
        )
        return present_outputs(outputs)

    def _bias(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A bias after which banned tokens have probability 0, of this tensor rank's part of the vocabulary."""
        ranks, size = self._tensor_ranks, weight.shape[0]
        first = 0 if ranks is None else ranks.rank * size
        banned = [token - first for token in self._banned_ids if first <= token < first + size]
        result = weight.new_zeros(size) if bias is None else bias
        return result.index_fill(0, torch.tensor(banned, dtype=torch.int64, device=weight.device), _NEVER)

    def _temperature_of(self, inputs: ModelInput) -> float | Tensor:
        """The temperature of the model, or [T] where the batch has tokens of other temperatures."""
        temperatures = inputs.temperatures
        if temperatures is None:
            return self._temperature
        return torch.where(temperatures.isnan(), self._temperature, temperatures / self._factor)


def present_outputs(outputs: TokenOutputs) -> tuple[Tensor, ...]:
    """The outputs of a policy that are not None, in the order that `policy_outputs` expects."""
    every = (outputs.logprobs, outputs.entropy, outputs.clamped_entropy, outputs.squared_sums)
    every += (outputs.candidate_logprobs, outputs.candidate_ids)
    return tuple(values for values in every if values is not None)


def policy_outputs(spec: OutputSpec, values: Sequence[Tensor]) -> TokenOutputs:
    """Name the result of `present_outputs`, or its counterpart of a whole batch."""
    names = ["logprobs", "entropy"]
    if spec.entropy_clamp > 0:
        names.append("clamped_entropy")
    if spec.squared_sums:
        names.append("squared_sums")
    if spec.candidates is not None:
        names += ["candidate_logprobs", "candidate_ids"]
    outputs = dict(zip(names, values, strict=False))
    if spec.candidates is not None and len(values) < len(names):  # the whole vocabulary: ids as a view
        every = outputs["candidate_logprobs"]
        outputs["candidate_ids"] = torch.arange(every.shape[1], device=every.device).expand(every.shape)
    return TokenOutputs(**outputs)


def _of_tensor_rank(weight: Tensor) -> Tensor:
    """This tensor rank's part of a weight that FSDP has gathered."""
    if isinstance(weight, DTensor) and weight.device_mesh.mesh_dim_names == ("tensor",):
        return weight.to_local()
    return weight


class ValueModel(TokenModel):
    """A backbone with a one-output head `score` that computes in float32."""

    def as_outputs(self, values: Sequence[Tensor]) -> TokenOutputs:
        return TokenOutputs(values=values[0])

    def _outputs(self, inputs: ModelInput) -> tuple[Tensor]:
        return (torch.where(inputs.has_label, self._head(inputs), 0.0),)

    def _head(self, inputs: ModelInput) -> Tensor:
        return self.model.get_submodule("score")(self._hidden(inputs).float()).squeeze(-1)


class ScoreModel(ValueModel):
    """The same model as a reward model: the head's output at every token, the last of each sequence included."""

    needs_last = True

    def as_outputs(self, values: Sequence[Tensor]) -> TokenOutputs:
        return TokenOutputs(scores=values[0])

    def _outputs(self, inputs: ModelInput) -> tuple[Tensor]:
        return (self._head(inputs).clone(),)  # FSDP warns about outputs that are views
