import openai
import pytest
from openai import OpenAI

from tests.agent.session_kit import KEY, answer, in_thread, served

ASK = {"model": "m", "prompt": "2+2="}


def run(address, ask):
    def call():
        with OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0) as api:
            return ask(api)

    return in_thread(call)


async def test_the_synchronous_sdk_reads_two_answers_with_logprobs():
    async with served((answer("4"), answer("5"))) as (address, session, _):
        got = await run(address, lambda api: api.completions.create(**ASK, n=2, logprobs=0, seed=3, stop="\n"))
    assert [choice.text for choice in got.choices] == ["4", "5"]
    assert got.choices[0].logprobs.tokens == ["t0", "t1", "t2"]
    assert got.choices[0].logprobs.text_offset == [0, 2, 4]
    assert got.usage.completion_tokens == 6
    request = session.requests[0]
    assert (request.prompt, request.messages, request.num_answers) == ("2+2=", (), 2)
    assert (request.settings.max_new_tokens, request.settings.seed, request.settings.stop) == (16, 3, ("\n",))


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]])
async def test_a_prompt_may_be_token_ids_and_a_stream_ends_with_the_usage(prompt):
    async with served() as (address, session, _):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = await run(address, lambda api: list(api.completions.create(model="m", prompt=prompt, **options)))
    assert session.requests[0].prompt == (5, 6)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "four"
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 10)


@pytest.mark.parametrize(
    ("more", "param", "code"),
    [
        ({"prompt": ["a", "b"]}, "prompt", "agent.unsupported_field"),
        ({"prompt": [True]}, "prompt", "agent.invalid_field"),
        ({"prompt": ""}, "prompt", "agent.invalid_field"),
        ({"logprobs": 2}, "logprobs", "agent.unsupported_field"),
        ({"echo": True}, "echo", "agent.unsupported_field"),
        ({"best_of": 2}, "best_of", "agent.unsupported_field"),
        ({"suffix": "x"}, "suffix", "agent.unsupported_field"),
    ],
)
async def test_a_wrong_field_is_refused_by_its_name(more, param, code):
    async with served() as (address, session, _):
        with pytest.raises(openai.BadRequestError) as caught:
            await run(address, lambda api: api.completions.create(**{**ASK, **more}))
        assert (caught.value.param, caught.value.code) == (param, code)
        assert session.requests == []
