import dataclasses

import pytest

from areal.api.data import GenerationResponse
from areal.cli.try_workflow import remarks_on, spans_of
from areal.workflow import Conversation, chat_prompt

ROW = {"messages": [{"role": "user", "content": "2+2?"}]}
END = 1


def made(tokenizer, *answers):
    """A trajectory of these answers with retries in between, and the responses."""
    conversation, responses = Conversation(tokenizer, chat_prompt(ROW, tokenizer)), []
    for index, answer in enumerate(answers):
        if index:
            conversation.add_text("?")
        ids = answer if isinstance(answer, list) else tokenizer.encode(answer)
        stop_reason = "stop" if ids[-1:] == [END] else "length"
        columns = {"output_ids": ids, "output_logprobs": [-0.5] * len(ids), "output_versions": [3] * len(ids)}
        responses.append(GenerationResponse(request_id="r", input_ids=[], stop_reason=stop_reason, **columns))
        conversation.add_answer(responses[-1])
    return conversation.to_trajectory(1.0), responses


@pytest.fixture
def codes_of(tokenizer):
    return lambda trajectory, responses: [item.code for item in remarks_on(trajectory, responses, tokenizer, {END})]


def test_a_correct_trajectory_has_no_remark(tokenizer, codes_of):
    trajectory, responses = made(tokenizer, "5<e>", "4<e>")
    assert codes_of(trajectory, responses) == []
    assert [(span.trained, tokenizer.decode(span.token_ids)) for span in spans_of(trajectory)][1:] == [
        (True, "5<e>"),
        (False, "?"),
        (True, "4<e>"),
    ]


def test_a_mask_that_covers_other_tokens_is_reported(tokenizer, codes_of):
    trajectory, responses = made(tokenizer, "5<e>", "4<e>")
    shifted = dataclasses.replace(trajectory, loss_mask=[*trajectory.loss_mask[1:], 1])
    assert "not_generated" in codes_of(shifted, responses)


def test_a_text_that_was_encoded_again_is_reported(tokenizer, codes_of):
    """The policy wrote the characters of "<e>", and the workflow put the end token into the trajectory."""
    _, responses = made(tokenizer, [*(ord(character) + 3 for character in "<e>"), END])
    encoded_again, _ = made(tokenizer, "<e><e>")
    assert codes_of(encoded_again, responses) == ["not_generated", "not_trained"]


def test_tokens_whose_text_encodes_to_others_are_reported(tokenizer, codes_of):
    assert codes_of(*made(tokenizer, [*(ord(character) + 3 for character in "<e>"), END])) == ["other_encoding"]


def test_a_missing_end_token_is_reported(tokenizer, codes_of):
    assert codes_of(*made(tokenizer, "4")) == ["no_end_token"]


@pytest.mark.parametrize("reward", ["1.0", None, True])
def test_a_reward_of_another_type_is_reported(tokenizer, codes_of, reward):
    trajectory, responses = made(tokenizer, "4<e>")
    assert codes_of(dataclasses.replace(trajectory, reward=reward), responses) == ["reward_type"]
