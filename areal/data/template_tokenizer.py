"""A byte-level tokenizer made for a chat template alone, to prove the template without a model's files."""

import re
from typing import Any

_SPECIAL = re.compile(
    r"<\|[^|<>\s'\"]+\|?>|<\w+\|>|<｜[^｜<>\s]+｜>|\[/?[A-Z][A-Z_]+\]|</s>|<s>|<(?:start|end|beginning)_of_\w+>|<eos>|<bos>"
)
_TAG = re.compile(r"</?[a-z_]+>")


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
