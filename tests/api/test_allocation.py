"""The allocation grammar: every documented example, every refusal, and printing that parses back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.allocation import AllocationError, AllocationMode, ModelAllocation, ParallelDims, check_supported
from areal.api.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "printed", "world_size"),
    [
        ("d4", "fsdp:d4", 4),
        ("t2d2", "fsdp:d2t2", 4),
        ("d2p2", "megatron:d2p2", 4),
        ("d4e2", "megatron:d4e2", 4),
        ("fsdp:d2c2", "fsdp:d2c2", 4),
        ("fsdp:d4e2", "fsdp:d4e2", 4),
        ("fsdp:(attn:d4|ffn:d2e2)", "fsdp:d4e2", 4),
        ("[actor]:d2", "fsdp[actor]:d2", 2),
        ("native:d2+fsdp:d1", "native:d2+fsdp:d1", 3),
        (" native : d 2 + fsdp : d1 ", "native:d2+fsdp:d1", 3),
        ("sglang:d4+d8p1t1", "sglang:d4+fsdp:d8", 12),
        ("sglang:d2t4+megatron:d2p2t2", "sglang:d2t4+megatron:d2t2p2", 16),
        ("sglang:d4", "sglang:d4", 4),
        ("sglang:d4+cpu", "sglang:d4+cpu", 4),
        ("vllm:d2t2+eval", "vllm:d2t2+eval", 4),
        ("vllm[r]:d2t2|fsdp[a]:d4", "vllm[r]:d2t2|fsdp[a]:d4", 4),
        ("vllm:d2t2|fsdp[a]:d4", "vllm:d2t2|fsdp[a]:d4", 4),
        ("sglang[rollout]:d4+fsdp[actor]:d4|fsdp[ref]:d4", None, 8),
        ("native[r]:d1+fsdp[actor]:d1+fsdp[critic]:d2", None, 4),
        ("megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)", "megatron:d1t2p4c2e4", 16),
        ("megatron:attn:d4p2t2c2|ffn:d2p2t4e2", "megatron:(attn:d4t2p2c2|ffn:d2t4p2e2)", 32),
        ("(attn:d4|ffn:d2e2)", "megatron:d4e2", 4),
        ("sglang:d1+attn:d4|ffn:d2t2", "sglang:d1+megatron:(attn:d4|ffn:d2t2)", 5),
    ],
)
def test_what_is_written_is_understood(text: str, printed: str | None, world_size: int) -> None:
    mode = AllocationMode.parse(text)
    assert str(mode) == (printed or text)
    assert mode.world_size == world_size
    assert AllocationMode.parse(str(mode)) == mode


def test_the_parts_of_a_mode() -> None:
    mode = AllocationMode.parse("sglang[rollout]:d2t4+fsdp[actor]:d4|fsdp[ref]:d4")
    rollout, actor, ref = mode.allocations
    assert [allocation.name for allocation in mode.allocations] == ["rollout", "actor", "ref"]
    assert mode.inference is rollout
    assert (rollout.num_replicas, rollout.instance_size) == (2, 4)
    assert mode.train == [actor, ref]
    assert (actor.num_replicas, actor.instance_size) == (1, 4)
    assert [allocation.shares_with for allocation in mode.allocations] == [None, None, 1]
    assert AllocationMode.parse("d4").inference is None


def test_expert_layers_fold_over_the_same_devices() -> None:
    dims = AllocationMode.parse("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)").allocations[0].parallel
    assert dims == ParallelDims(dp=4, tp=2, pp=2, cp=2, ep=2, etp=4)
    assert (dims.world_size, dims.edp) == (32, 2)
    assert AllocationMode.parse("d4e2").allocations[0].parallel.edp == 2


@pytest.mark.parametrize(
    ("text", "column", "words"),
    [
        ("", 1, "native:d1+fsdp:d1"),
        ("  ", 1, "native:d1+fsdp:d1"),
        ("native:d1+", 11, "sizes are missing"),
        ("+d1", 1, "sizes are missing"),
        ("fsdp:", 6, "sizes are missing"),
        ("fsdp[a]", 8, "':' is missing"),
        ("fsdp[]:d1", 6, "a name is missing"),
        ("fsdp[9]:d1", 6, "names start with a letter"),
        ("fsdp[a:d1", 7, "']' is missing"),
        ("native:d2,fsdp:d2", 10, "unexpected character ','"),
        ("native:d1 fsdp:d1", 11, "unexpected 'fsdp'; join parts by +"),
        ("d1)", 3, "unexpected ')'"),
        ("native:d1++d1", 11, "sizes are missing"),
        ("sglang.d4", 7, "write sglang: instead of sglang."),
        ("sglan:d4", 1, "unknown backend 'sglan'; write sglang"),
        ("NATIVE:d4", 1, "unknown backend 'NATIVE'; write native"),
        ("ray:d4", 1, "use one of native, sglang, vllm, fsdp, megatron"),
        ("d0", 1, "d0"),
        ("d04", 1, "without a leading zero"),
        ("d", 1, "a number is missing after 'd'"),
        ("native:dx+fsdp:d1", 8, "a number is missing after 'd'"),
        ("D4", 1, "unknown letter 'D'; write d"),
        ("d4d2", 3, "'d' (data)"),
        ("4", 1, "'4'"),
        ("fsdp:d4x2", 8, "'x'"),
        ("sglang:d4c2", 10, "sglang has no context size"),
        ("native:d4e2", 10, "native has no expert size"),
        ("cpu", 1, "a number is missing after 'c'"),
        ("d4+eval", 4, "one inference part"),
        ("sglang:d1+vllm:d1+eval", 19, "one inference part"),
        ("vllm:d2t2|fsdp:d4", 11, "shares devices has no name"),
        ("vllm[r]:d2|fsdp[a]:d4", 12, "vllm[r]:d2|fsdp[a]:d4"),
        ("native:d1+fsdp:d1+fsdp:d1", 1, "with three or more parts each needs one"),
        ("d4+d4", 1, "two trainers without backend need names"),
        ("fsdp[a]:d1+fsdp[a]:d2", 12, "'a'"),
        ("fsdp:d4p2", 1, "fsdp has no pipeline and does not split an expert; write megatron:d4p2"),
        ("fsdp:d4e3", 1, "choose e so that it divides d x c x t"),
        ("fsdp:(attn:d4|ffn:d2t2)", 1, "does not split an expert"),
        ("megatron:d3e2", 1, "3 devices cannot be split"),
        ("megatron:d2p2e4", 1, "4 devices cannot be split"),
        ("attn:d2c2|ffn:e3", 1, "4 devices cannot be split into p1 x expert t1 x e3"),
        ("attn:d2p2|ffn:d2p1e2", 1, "p1"),
        ("megatron[x]:(attn:d2|ffn:d2)", 13, "cannot have a name"),
        ("sglang:attn:d1|ffn:d1", 8, "no attn/ffn form"),
        ("megatron:(attn:d2|ffn:d2", 25, "')' is missing"),
        ("megatron:(ffn:d2|attn:d2)", 11, "'attn' is missing"),
        ("attn:d2+ffn:d2", 8, "'|' is missing"),
        ("attn:d2e2|ffn:d2", 8, "attn has no expert size"),
        ("attn:d2|ffn:d2c2", 15, "ffn has no context size"),
        ("native:d1\n+x", 12, "'x'"),
    ],
)
def test_mistakes_are_pointed_at(text: str, column: int, words: str) -> None:
    with pytest.raises(AllocationError) as caught:
        AllocationMode.parse(text)
    message = str(caught.value)
    assert words in message
    assert (caught.value.column, caught.value.code) == (column, "allocation.invalid")
    assert message.startswith(caught.value.summary)
    assert "\n" not in caught.value.summary
    shown, caret = message.split("\n")[1:]
    assert len(shown) == len(text) + 2
    assert caret.index("^") == column + 1  # two blanks of indentation


@pytest.mark.parametrize(
    "text",
    [
        "native:d2+fsdp:d1",
        "native[r]:d1+fsdp[a]:d3",
        "native:d1+d2",
        "sglang:d2t1+fsdp:d1",
        "sglang:d2t4+d2",
        "vllm:d1t2+fsdp:d1",
        "fsdp:d4",
        "d1",
    ],
)
def test_what_this_version_launches(text: str) -> None:
    check_supported(AllocationMode.parse(text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("native:d2t2+fsdp:d1", "native:d2 or sglang:d2t2"),
        ("native:d2p2+fsdp:d1", "native:d2 or sglang:d2t2"),
        ("sglang:d2t2p2+fsdp:d1", "sglang:d2t4"),
        ("vllm:d1p2+fsdp:d1", "vllm:d1t2"),
        ("sglang:d1+vllm:d1+fsdp:d1", "a name is missing"),
        ("vllm[a]:d1+native[b]:d1+fsdp[c]:d1", "vllm[a]:d1+native[b]:d1+fsdp[c]:d1"),
        ("vllm:d1", "vllm:dNtK+fsdp:dM"),
        ("native:d1", "native:dN+fsdp:dM"),
        ("native:d1|fsdp[a]:d1", "native:dN+fsdp:dM"),
        ("fsdp:d1+native:d1", "native:dN+fsdp:dM"),
        ("native[r]:d1+fsdp[a]:d1|fsdp[b]:d1", "native:dN+fsdp:dM"),
    ],
)
def test_an_allocation_that_this_version_lacks_names_one_that_it_has(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        check_supported(AllocationMode.parse(text))
    assert caught.value.code in ("config.unsupported", "allocation.invalid")


SIZES = st.sampled_from([1, 2, 4])


@st.composite
def parts(draw, name: str, world: int) -> ModelAllocation:
    """A part that takes `world` devices."""
    tp = draw(st.sampled_from([size for size in (1, 2, 4) if world % size == 0]))
    pp = draw(st.sampled_from([size for size in (1, 2) if world // tp % size == 0]))
    backend = draw(st.sampled_from(["native", "sglang", "vllm", "fsdp", "megatron"]))
    if backend == "fsdp":
        pp = 1
    cp, ep, etp = 1, 1, 1
    if backend in ("fsdp", "megatron"):
        cp = draw(st.sampled_from([size for size in (1, 2) if world // tp // pp % size == 0]))
    if backend in ("fsdp", "megatron"):
        ep = draw(st.sampled_from([size for size in (1, 2, 4) if world // pp % size == 0]))
        if not name and backend == "megatron":
            etp = draw(st.sampled_from([size for size in (1, 2) if world // pp // ep % size == 0]))
    dims = ParallelDims(dp=world // tp // pp // cp, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    return ModelAllocation(backend=backend, name=name, parallel=dims)


@st.composite
def modes(draw) -> AllocationMode:
    components = draw(st.integers(1, 4))
    allocations: list[ModelAllocation] = []
    for _ in range(components):
        world, anchor = draw(st.sampled_from([1, 2, 4, 8, 16])), len(allocations)
        for place in range(draw(st.integers(1, 3))):
            needs_name = components > 2 or place > 0
            name = f"n{len(allocations)}" if needs_name or draw(st.booleans()) else ""
            part = draw(parts(name, world))
            shared = {"shares_with": anchor} if place else {}
            allocations.append(ModelAllocation(backend=part.backend, name=name, parallel=part.parallel, **shared))
    alone = len(allocations) == 1 and allocations[0].is_inference
    evaluation = draw(st.sampled_from(["", "cpu", "eval"])) if alone else ""
    return AllocationMode(allocations=tuple(allocations), evaluation=evaluation)


@given(modes(), st.randoms(use_true_random=False))
def test_printing_parses_back(mode: AllocationMode, random) -> None:
    text = str(mode)
    assert AllocationMode.parse(text) == mode
    spaced = "".join(
        character + " " * random.randrange(2) if character in ":+|[]()" else character for character in text
    )
    assert AllocationMode.parse(spaced) == mode


@given(st.text(alphabet="dtpce0124:+|[]()_. anfsxyglvmrkeiwt", max_size=24))
def test_any_text_parses_or_is_refused_with_a_place(text: str) -> None:
    try:
        mode = AllocationMode.parse(text)
    except AllocationError as error:
        column = error.column
    else:
        column = 1
        assert AllocationMode.parse(str(mode)) == mode
    assert 1 <= column <= len(text) + 1
