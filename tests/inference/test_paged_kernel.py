"""Decoding with the kernel for paged caches, which a reference with its signature replaces here."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from areal.inference import model_runner
from areal.inference.decode_graph import DecodeGraphs
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


@pytest.mark.parametrize("family", ["qwen3-gqa", "mistral-window", "gemma2", "gpt_oss"])
def test_answers_are_those_of_copied_caches(family, build_model, drive, prompts, monkeypatch):
    """The kernel has neither the capped scores of gemma2 nor the sinks of gpt_oss, so it is not used for these."""
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


def capture_again(compute):
    """A graph without a GPU: it computes again, and only with the tensors that it was captured with."""
    logits = compute()
    return lambda: logits.copy_(compute()), logits


def at_most(*words, seqused_k, **rest):
    """A graph gives the kernel the largest length that its sizes allow."""
    *others, longest = words
    assert longest >= seqused_k.max()
    return reference(*others, int(seqused_k.max()), seqused_k=seqused_k, **rest)


def with_graphs(monkeypatch, capture=capture_again):
    monkeypatch.setattr(model_runner, "find_kernel", lambda *_, **__: at_most)
    monkeypatch.setattr(model_runner, "capture_of", lambda device: capture)


@pytest.mark.parametrize("family", ["qwen3-gqa", "mistral-window"])
def test_graphs_give_the_answers_of_steps_without_them(family, build_model, drive, prompts, monkeypatch):
    """Also for new weights in the other of two copies, and old ones in the first again."""
    answers, captured = [], []
    served = {}

    def pointers():
        return [weight.data_ptr() for weight in served["model"].parameters()]

    def counting(compute):
        local, (replay, logits) = pointers(), capture_again(compute)
        captured.append(local)

        def checked():
            assert local == pointers(), "a graph has fixed addresses"
            replay()

        return checked, logits

    monkeypatch.setattr(DecodeGraphs, "trial_error", lambda *_: 0.0)  # before `served` is known
    for is_graphed in (False, True):
        if is_graphed:
            with_graphs(monkeypatch, counting)
        driver, result = drive(build_model(family), max_running=4, max_prefill_tokens=16), []
        served["model"], other = driver.engine.runner.model, build_model(family, seed=7)
        for _ in range(3):
            sequences = [driver.add(prompt, max_new_tokens=20) for prompt in prompts]
            driver.run()
            result += sequences
            driver.engine.scheduler.forget_prefixes()
            for mine, new in zip(served["model"].parameters(), other.parameters(), strict=True):
                mine.data, new.data = new.data, mine.data
        answers.append(result)
    for plain, graphed in zip(*answers, strict=True):
        assert graphed.token_ids == plain.token_ids
        assert graphed.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
    assert len({tuple(ours) for ours in captured}) == 2
    assert len(captured) < 20, "the third round uses the graphs of the first"


@pytest.mark.parametrize("fault", ["refused", "other inputs are ignored"])
def test_graphs_that_fail_their_trial_are_not_used(fault, build_model, drive, prompts, monkeypatch):
    def wrong(compute):
        if fault == "refused":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return lambda: None, compute()

    with_graphs(monkeypatch, wrong)
    driver = drive(build_model("qwen3-gqa"), max_running=4, max_prefill_tokens=16)
    assert driver.engine.runner._graphs is None
    sequence = driver.add(prompts[0], max_new_tokens=3)
    driver.run()
    assert len(sequence.logprobs) == 3
