"""Spans of text that are whole tokens of two tokenizers, against a search over all pairs of prefixes."""

import itertools
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from areal.data.token_spans import Pieces, Span, common_spans, pieces_of, spread

TEXT = [
    "The answer of the sum is 12, because 5 + 7 = 12.",
    "naïve café, déjà vu: 10 € or 12 £ — 数学の答え 🙂🙃 end",
    "def f(x):\n    return x  +  1\n",
] * 20
WORDS = ["The ", "answer", " is", " 12", "\n", "  ", "é", "€", "数学", "🙂", "x", " = ", "zzz", "🙃🙂", ",", " Ω"]


def byte_pairs(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes and pairs of tokens, as those of GPT-2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def unigrams() -> PreTrainedTokenizerFast:
    """A tokenizer with a mark for the space before a word and tokens for bytes, as those of Llama 2 and Gemma."""
    pieces = [("<unk>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    pieces += [("▁", -3.0), ("▁answer", -2.0), ("▁is", -2.0), ("▁12", -2.0), ("an", -3.0), ("The", -2.0)]
    pieces += [(letter, -6.0) for letter in "abcdefghijklmnopqrstuvwxyz=,é"]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def by_search(item, ids, other, other_ids) -> list[Span]:
    """The longest list of borders at which both prefixes decode to the same text without a broken character."""
    text = item.decode(ids)
    borders = [(0, 0)]
    for end in range(1, len(ids) + 1):
        prefix = item.decode(ids[:end])
        whole = prefix and text.startswith(prefix) and prefix + item.decode(ids[end:]) == text
        for other_end in range(borders[-1][1] + 1, len(other_ids) + 1):
            if whole and other.decode(other_ids[:other_end]) == prefix:
                borders.append((end, other_end))
                break
    return [Span(slice(first[0], last[0]), slice(first[1], last[1])) for first, last in itertools.pairwise(borders)]


@pytest.fixture(scope="module")
def tokenizers():
    return [byte_pairs(256), byte_pairs(400), unigrams()]


@pytest.mark.parametrize("pair", [(0, 1), (1, 0), (1, 2), (2, 1)])
def test_spans_are_those_of_a_search(tokenizers, pair):
    first, other = (tokenizers[place] for place in pair)
    random_words = random.Random(pair[0])
    for _ in range(60):
        text = "".join(random_words.choices(WORDS, k=random_words.randint(1, 12)))
        ids, other_ids = (each.encode(text, add_special_tokens=False) for each in (first, other))
        spans = common_spans(pieces_of(first, ids), pieces_of(other, other_ids))
        assert spans == by_search(first, ids, other, other_ids), text
        assert spans[-1].tokens.stop == len(ids)
        assert spans[-1].other_tokens.stop == len(other_ids)


def test_a_policy_that_samples_bytes_has_the_borders_of_whole_characters(tokenizers):
    ids, other_ids = ([*each.encode("12 🙂 is")] for each in tokenizers[:2])
    assert len(ids) == 10
    spans = common_spans(pieces_of(tokenizers[0], ids), pieces_of(tokenizers[1], other_ids))
    assert [tokenizers[0].decode(ids[span.tokens]) for span in spans] == ["1", "2", " 🙂", " is"]


def test_other_text_is_one_span():
    assert common_spans(Pieces("ab", {1: 1, 2: 2}), Pieces("aB", {1: 1, 2: 3})) == [Span(slice(0, 2), slice(0, 3))]
    assert common_spans(Pieces("", {}), Pieces("", {})) == []


def test_the_log_probability_of_a_span_is_spread_over_its_tokens():
    spans = [Span(slice(0, 1), slice(0, 3)), Span(slice(1, 3), slice(3, 4))]
    assert spread(spans, [-1.0, -0.5, -0.5, -3.0], [0.0] * 3) == [-2.0, -1.5, -1.5]


def test_a_token_without_text_keeps_its_log_probability():
    assert spread([], [], [-0.25]) == [-0.25]
