"""Tiny checkpoints that both real servers take, and what our own train engine says about tokens under their weights."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from areal.api.config import TrainEngineConfig
from areal.data.pack import rows_to_train_batch
from areal.engine.fsdp import build_fsdp_engine
from areal.engine.mesh import TrainerMesh

SPECIALS = ("<pad>", "<eos>", "<unk>")
EOS = 1
CHARACTERS = string.ascii_letters + string.digits + "=+-*/.,;: "
VOCABULARY = [*SPECIALS, *CHARACTERS]
VOCAB_SIZE = len(VOCABULARY)  # 75, no round number: servers pad it


def token_id(character: str) -> int:
    return VOCABULARY.index(character)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, so that stop strings may span tokens."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=1024
    )


def build_model(seed: int) -> Qwen2ForCausalLM:
    """Grouped heads, biases and tied embeddings, as Qwen2.5-0.5B has them; far from uniform, as a trained model is."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32, the smallest that vLLM's CPU attention takes
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=0,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # else zero, and a bias that is not sent would go unseen
                parameter.normal_(std=0.2)
    return model.eval()


def write_checkpoint(folder: Path, seed: int) -> Path:
    """Model and tokenizer in Hugging Face form."""
    build_model(seed).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


class Scorer:
    """The trainer's engine in float32, asked for log-probabilities."""

    def __init__(self, folder: Path, temperature: float = 1.0) -> None:
        config = TrainEngineConfig(path=str(folder), dtype="float32", temperature=temperature)
        self._engine = build_fsdp_engine(config, role="ref", total_steps=1, mesh=TrainerMesh.open(None), seed=0)

    def logprobs(self, prompt: list[int], output: list[int]) -> list[float]:
        """Of every output token, given all before it."""
        row = prompt + output
        outputs = self._engine.forward(rows_to_train_batch([row], [[0] + [1] * (len(row) - 1)]))
        assert outputs.logprobs is not None
        return outputs.logprobs[len(prompt) - 1 : len(row) - 1].tolist()
