import pytest

from areal.api.config import GenerationHyperparameters
from areal.api.data import GenerationResponse, TrajectoryGroup, reward_parts
from areal.ledger.payload import TokenLimits, encode_episode
from areal.workflow import Conversation, ConversationWorkflow, chat_prompt, generate, score
from tests.expect import raises_code

ROW = {"messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
FIRST = "<s>user\n2+2?<e>\n<s>assistant\n"
END = 1


def response(ids, *, stop_reason="stop"):
    return GenerationResponse(
        request_id="r",
        input_ids=[],
        output_ids=ids,
        output_logprobs=[-0.5] * len(ids),
        output_versions=[7] * len(ids),
        stop_reason=stop_reason,
    )


@pytest.fixture
def conversation(tokenizer):
    return Conversation(tokenizer, chat_prompt(ROW, tokenizer))


@pytest.fixture
async def workflow_of(tokenizer):
    made = []

    def make(converse, **options):
        workflow_class = type("Own", (ConversationWorkflow,), {"converse": converse})
        made.append(workflow_class("exact", GenerationHyperparameters(**options), tokenizer))
        return made[-1]

    yield make
    for workflow in made:
        await workflow.aclose()


class TestTokens:
    def test_generated_tokens_are_never_encoded_again(self, conversation, tokenizer):
        """The policy wrote "<e>" as three characters, which the tokenizer would encode as one end token."""
        written = [ord(character) + 3 for character in "<e>"]
        conversation.add_answer(response([*written, END]))
        conversation.add_messages([{"role": "user", "content": "again"}])
        prompt = tokenizer.encode(FIRST)
        assert conversation.token_ids[: len(prompt) + 4] == [*prompt, *written, END]
        assert tokenizer.encode(conversation.text) != conversation.token_ids

    def test_only_generated_tokens_have_mask_logprob_and_version(self, conversation, tokenizer):
        answer = tokenizer.encode("5<e>")
        conversation.add_answer(response(answer))
        conversation.add_messages([{"role": "user", "content": "no"}])
        conversation.add_answer(response(tokenizer.encode("4"), stop_reason="length"))
        trajectory = conversation.to_trajectory(0.5, reward_parts={"exact": 1.0})
        encode_episode(0, TrajectoryGroup(trajectories=[trajectory]), TokenLimits(2**16, 99, strict=True))
        between = len(tokenizer.encode("\n<s>user\nno<e>\n<s>assistant\n"))
        assert trajectory.loss_mask == [0] * len(tokenizer.encode(FIRST)) + [1, 1] + [0] * between + [1]
        for mask, logprob, version in zip(
            trajectory.loss_mask, trajectory.rollout_logprobs, trajectory.output_versions, strict=True
        ):
            assert (logprob, version) == ((-0.5, 7) if mask else (0.0, -1))
        assert (trajectory.reward, reward_parts(trajectory.columns), trajectory.finished) == (
            0.5,
            {"exact": 1.0},
            False,
        )

    @pytest.mark.parametrize(("answer", "shown"), [("5<e>", "5<e>\n<s>user"), ("5", "5<e>\n<s>user")])
    def test_the_end_token_of_an_answer_is_there_once(self, conversation, tokenizer, answer, shown):
        conversation.add_answer(response(tokenizer.encode(answer)))
        conversation.add_messages([{"role": "user", "content": "again"}])
        assert tokenizer.decode(conversation.token_ids).startswith(FIRST + shown)

    def test_plain_text_that_begins_like_the_answer_ends_is_kept(self, conversation, tokenizer):
        conversation.add_answer(response(tokenizer.encode("12")))
        conversation.add_text("2=")
        assert tokenizer.decode(conversation.token_ids) == FIRST + "122="

    def test_a_message_cannot_write_control_tokens(self, conversation, tokenizer):
        conversation.add_answer(response(tokenizer.encode("5<e>")))
        conversation.add_messages([{"role": "tool", "content": "1<e>2"}])
        assert conversation.text == "<s>user\n2+2?<e>\n<s>assistant\n5\n<s>tool\n1<e>2<e>\n<s>assistant\n"
        written = tokenizer.encode("1") + [ord(character) + 3 for character in "<e>"] + tokenizer.encode("2<e>")
        assert str(written)[1:-1] in str(list(conversation.token_ids))

    def test_a_template_that_hides_answers_has_no_further_turns(self, conversation, tokenizer):
        tokenizer.apply_chat_template = lambda messages, **options: messages[0]["content"]
        with raises_code("data.chat_template"):
            conversation.add_messages([{"role": "user", "content": "again"}])

    def test_a_turn_that_leaves_no_room_changes_nothing(self, tokenizer):
        prompt = chat_prompt(ROW, tokenizer)
        conversation = Conversation(tokenizer, prompt, max_tokens=len(prompt.token_ids) + 4)
        conversation.add_answer(response([END]))
        before = conversation.token_ids
        assert not conversation.add_messages([{"role": "user", "content": "a"}])
        assert not conversation.add_text("abc")
        assert conversation.token_ids == before
        assert conversation.add_text("ab")

    def test_the_context_of_an_answer_is_what_came_before(self, conversation, tokenizer):
        conversation.add_answer(response(tokenizer.encode("5<e>")))
        conversation.add_text("?")
        conversation.add_answer(response(tokenizer.encode("4<e>")))
        first, last = conversation.answers
        assert (first.text, last.text) == ("5", "4")
        assert conversation.context_of(first).text == FIRST
        assert conversation.context_of(last).text == FIRST + "5?"
        assert conversation.context_of(last).token_ids == tokenizer.encode(FIRST + "5<e>?")

    def test_a_conversation_without_an_answer_is_no_trajectory(self, conversation):
        with raises_code("workflow.no_answer"):
            conversation.to_trajectory(0.0)


class TestWorkflow:
    async def test_a_reward_is_a_score_or_a_number(self, workflow_of, engine_of):
        async def by_functions(self, episode, conversation):
            await generate(episode, conversation)
            return (await score(episode, conversation)).scaled(0.5)

        async def by_itself(self, episode, conversation):
            return float(len(await generate(episode, conversation)))

        scored = await workflow_of(by_functions, n_samples=2).arun_episode(engine_of(["4<e>", "5<e>"]), ROW)
        assert [trajectory.reward for trajectory in scored.trajectories] == [0.5, 0.0]
        assert scored.filter_rewards == [0.5, 0.0]
        assert scored.stats["num_turns"] == 1.0
        ours = await workflow_of(by_itself, n_samples=2).arun_episode(engine_of(["4<e>", "five<e>"]), ROW)
        assert [trajectory.reward for trajectory in ours.trajectories] == [1.0, 4.0]

    @pytest.mark.parametrize("wrong", [None, "1.0", {"score": 1.0}])
    async def test_a_reward_of_another_type_fails(self, workflow_of, engine_of, wrong):
        async def converse(self, episode, conversation):
            await generate(episode, conversation)
            return wrong

        with raises_code("workflow.wrong_reward"):
            await workflow_of(converse).arun_episode(engine_of(["4<e>"]), ROW)

    async def test_all_requests_of_a_group_have_different_ids(self, workflow_of, engine_of):
        async def converse(self, episode, conversation):
            for _ in range(3):
                await generate(episode, conversation)
                conversation.add_text("!")
            return 1.0

        engine = engine_of(["4<e>"] * 6)
        await workflow_of(converse, n_samples=2).arun_episode(engine, ROW)
        assert len({request.request_id for request in engine.requests}) == 6
        assert len({request.group_id for request in engine.requests}) == 1
