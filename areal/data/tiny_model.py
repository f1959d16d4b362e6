"""Tokenizers and a small random model that are made on the spot: for examples, tests and proofs of chat templates."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"]+\|?>|<\w+\|>|<｜[^｜<>\s]+｜>|\[/?[A-Z][A-Z_]+\]|</s>|<s>|<(?:start|end|beginning)_of_\w+>|<eos>|<bos>"
)
_TAG = re.compile(r"</?[a-z_]+>")


def character_tokenizer(
    tokens: Sequence[str], *, end: str = "<eos>", context_length: int = 64, chat_template: str | None = None
) -> Any:
    """A tokenizer of `tokens`: `<pad>`, `end`, `<unk>` first, then characters and longer texts of one token each.

    Tokens like `<|user|>` are special: decoding can leave them out.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    special = [token for token in tokens if re.fullmatch(r"<\|\w+\|>", token) and token != end]
    pieces = [token for token in tokens[3:] if len(token) > 1 and token not in special]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    pattern = "|".join([*map(re.escape, pieces), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token=end,
        unk_token="<unk>",
        model_max_length=context_length,
        **({"additional_special_tokens": special} if special else {}),
    )
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def tiny_model(
    tokenizer: Any, seed: int, *, vocab_size: int = 0, num_heads: int = 2, initializer_range: float = 0.02
) -> Any:
    """A random Qwen2 model in float32: 2 layers of width 64. `vocab_size` 0: one entry for each token.

    With 2 heads, of 32 dimensions, vLLM can serve it.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    shape = _tiny_shape(tokenizer, vocab_size or len(tokenizer))
    shape |= {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "initializer_range": initializer_range,
    }
    return Qwen2ForCausalLM(Qwen2Config.from_dict(shape))


def _tiny_shape(tokenizer: Any, vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "dtype": "float32",
    }


def write_tiny_model(folder: Path, tokenizer: Any, seed: int, *, vocab_size: int) -> None:
    """The checkpoint of a model like `tiny_model`, with other random numbers. Without torch, whose import takes longer
    than the rest."""
    import numpy as np
    from safetensors.numpy import save_file

    shape = _tiny_shape(tokenizer, vocab_size)
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    matrices = {"model.embed_tokens": (vocab_size, width), "lm_head": (vocab_size, width)}
    norms, biases = ["model.norm"], list[str]()
    for layer in (f"model.layers.{number}" for number in range(shape["num_hidden_layers"])):
        matrices |= {f"{layer}.self_attn.{name}_proj": (width, width) for name in "qkvo"}
        matrices |= {f"{layer}.mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        matrices[f"{layer}.mlp.down_proj"] = (width, inner)
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
        biases += [f"{layer}.self_attn.{name}_proj.bias" for name in "qkv"]
    draw = np.random.default_rng(seed)
    weights = {f"{name}.weight": draw.normal(0.0, 0.02, size).astype(np.float32) for name, size in matrices.items()}
    weights |= {f"{name}.weight": np.ones(width, np.float32) for name in norms}
    weights |= {name: np.zeros(width, np.float32) for name in biases}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", **shape}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def template_tokenizer(template: str, *, special_tokens: tuple[str, ...] = ()) -> Any:
    """A tokenizer with the template. The tokens are guessed from the template's text.

    `<|x|>`, `[X]`, `</s>` and the like are special tokens, tags such as `<tool_call>` are added tokens that are not
    special. The end token is the first of `special_tokens`, or `</s>`.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = dict.fromkeys([*special_tokens, "</s>", "<s>", *_SPECIAL.findall(template)])
    tags = dict.fromkeys(tag for tag in _TAG.findall(template) if tag not in special)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in tags])
    end = special_tokens[0] if special_tokens else "</s>"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=end, pad_token=end, chat_template=template
    )


IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens of Qwen-VL that surround and hold images."""
