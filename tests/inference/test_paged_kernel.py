"""Decoding with the kernel for paged caches, which a reference with its signature replaces here."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from areal.inference import model_runner
from areal.inference.paged_kernel import find_kernel, trial_error


def reference(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k,
              block_table):  # fmt: skip
    """`varlen_attn` for one query token per sequence."""
    assert cu_seq_q.tolist() == list(range(len(query) + 1))
    assert (cu_seq_k, max_q, max_k, window_size[1]) == (None, 1, max(seqused_k.tolist()), 0)
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert block_table.dtype == seqused_k.dtype == torch.int32
    rows = []
    for row, length in enumerate(seqused_k.tolist()):
        first = 0 if window_size[0] < 0 else max(0, length - 1 - window_size[0])
        keys, values = (
            pool[block_table[row].long()].flatten(0, 1)[first:length].transpose(0, 1) for pool in (key, value)
        )
        repeats = query.shape[1] // key.shape[2]
        keys, values = (states.repeat_interleave(repeats, dim=0) for states in (keys, values))
        rows.append(scaled_dot_product_attention(query[row][:, None], keys, values, scale=scale)[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("family", ["qwen3-gqa", "mistral-window"])
def test_answers_are_those_of_copied_caches(family, build_model, drive, prompts, monkeypatch):
    model = build_model(family)
    answers = []
    for kernel in (None, reference):
        monkeypatch.setattr(model_runner, "find_kernel", lambda *_, kernel=kernel, **__: kernel)
        driver = drive(model, max_running=4, max_prefill_tokens=16)
        sequences = [driver.add(prompt, max_new_tokens=20) for prompt in prompts]
        driver.run()
        answers.append(sequences)
    for copied, paged in zip(*answers, strict=True):
        assert paged.token_ids == copied.token_ids
        assert paged.logprobs == pytest.approx(copied.logprobs, abs=1e-5)


def test_a_trial_shows_whether_a_kernel_reads_the_right_blocks():
    sizes = (torch.device("cpu"), torch.float32, 16, 4, 2, 8)
    assert trial_error(reference, *sizes) < 1e-5
    assert (
        trial_error(lambda *words, block_table, **rest: reference(*words, block_table=block_table * 0, **rest), *sizes)
        > 0.1
    )
    assert find_kernel(sizes[0], torch.bfloat16, block_size=16, heads=4, kv_heads=2, size=8) is None
