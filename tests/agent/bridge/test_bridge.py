from areal.agent.bridge import BridgeGap, template_bridge
from tests.data.conftest import tokenizer, tokenizer_folder  # noqa: F401

USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "four"}


def test_prompt_answer_and_bridge_are_the_next_prompt(tokenizer):  # noqa: F811
    bridge = template_bridge(tokenizer)
    new = [{"role": "user", "content": "sure?"}]
    tail = bridge.extension([USER, ANSWER], new, ())
    assert not isinstance(tail, BridgeGap)
    answer = tokenizer.encode("four", add_special_tokens=False)
    assert bridge.prompt([USER], ()) + answer + tail == bridge.prompt([USER, ANSWER, *new], ())
    assert tail[0] in bridge.stop_token_ids


def test_a_history_without_an_answer_is_a_gap(tokenizer):  # noqa: F811
    gap = template_bridge(tokenizer).extension([USER], [USER], ())
    assert isinstance(gap, BridgeGap)
    assert gap.reason == "no_answer"
