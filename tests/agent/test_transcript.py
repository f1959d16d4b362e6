import pytest

from areal.agent.transcript import Transcript, message_key, path_to, tokens_to
from areal.agent.turns import TurnRefused, TurnRequest
from tests.agent.char_bridge import CharBridge, answer, messages_of, request_of, response_of, text_of
from tests.expect import raises_code

TOOL = {"type": "function", "function": {"name": "add"}}


def branches(transcript: Transcript) -> list[str]:
    return [text_of(tokens_to(leaf)) for leaf in transcript.tree.leaves()]


def stored(transcript: Transcript) -> int:
    nodes, count = [transcript.tree.root], 0
    while nodes:
        node = nodes.pop()
        count += len(node.token_ids)
        nodes += node.children
    return count


class TestExtension:
    def test_a_turn_extends_the_generated_tokens_without_a_second_tokenisation(self):
        """The policy's tokens differ from those that its delivered text would have."""
        transcript = Transcript(bridge := CharBridge())
        context = transcript.context(request_of("u:hi"))
        transcript.add_answer(context, "1", response_of("O K>"), {"role": "assistant", "content": "OK"})
        later = transcript.context(request_of("u:hi", "a:OK", "t:3"))
        assert text_of(later.token_ids) == "<uhi><aO K><t3><a"
        assert later.after is transcript.turns["1"].node
        assert (later.is_fork, later.is_drift, bridge.num_rendered) == (False, False, 1)

    def test_an_end_that_the_policy_did_not_generate_is_inserted(self):
        transcript = Transcript(CharBridge())
        answer(transcript, request_of("u:hi"), "OK", "1", stop_reason="length")
        assert text_of(transcript.context(request_of("u:hi", "a:OK", "u:go")).token_ids) == "<uhi><aOK><ugo><a"
        assert not transcript.turns["1"].finished

    def test_the_context_changes_nothing(self):
        transcript = Transcript(CharBridge())
        for _ in range(2):
            transcript.context(request_of("u:hi"))
        assert (stored(transcript), transcript.num_turns, transcript.tree.leaves()) == (0, 0, [])

    def test_a_turn_stores_its_new_tokens_only(self):
        transcript = Transcript(CharBridge())
        texts = ["u:hi"]
        sizes = []
        for turn in range(5):
            before = stored(transcript)
            answer(transcript, request_of(*texts), "ok>", str(turn))
            sizes.append(stored(transcript) - before)
            texts += ["a:ok", "t:7"]
        assert sizes == [len("<uhi><aok>")] + [len("<t7><aok>")] * 4
        assert [turn.number for turn in transcript.turns.values()] == [0, 1, 2, 3, 4]

    def test_best_of_n_answers_are_leaves_of_one_context(self):
        transcript = Transcript(CharBridge())
        context = transcript.context(request_of("u:hi"))
        for turn, text in enumerate(["yes>", "no>", "yes>"]):
            transcript.add_answer(context, str(turn), response_of(text), {"role": "assistant", "content": text[:-1]})
        assert branches(transcript) == ["<uhi><ayes>", "<uhi><ano>", "<uhi><ayes>"]
        assert stored(transcript) == len("<uhi><a") + len("yes>no>yes>")
        assert (transcript.num_turns, transcript.num_forks) == (1, 0)
        answer(transcript, request_of("u:hi", "a:no", "u:go"), "k>", "3")
        assert branches(transcript)[1] == "<uhi><ano><ugo><ak>"

    def test_other_tools_are_another_dialogue(self):
        transcript = Transcript(CharBridge())
        answer(transcript, request_of("u:hi"), "ok>", "1")
        later = transcript.context(request_of("u:hi", "a:ok", "u:go", tools=(TOOL,)))
        assert text_of(later.token_ids) == "[add]<uhi><aok><ugo><a"
        assert (later.is_fork, later.is_drift) == (True, False)

    def test_a_second_dialogue_is_a_fork_that_shares_its_first_tokens(self):
        transcript = Transcript(CharBridge())
        answer(transcript, request_of("s:be good", "u:hi"), "ok>", "1")
        answer(transcript, request_of("s:be good", "u:ho"), "k>", "2")
        assert (transcript.num_forks, transcript.num_drifts) == (1, 0)
        assert stored(transcript) == len("<sbe good><uh") + len("i><aok>") + len("o><ak>")

    def test_a_prompt_that_leaves_no_room_is_refused(self):
        transcript = Transcript(CharBridge(), max_tokens=7)
        with pytest.raises(TurnRefused) as error:
            transcript.context(request_of("u:hi"))
        assert (error.value.code, error.value.status) == ("agent.prompt_too_long", 400)
        Transcript(CharBridge(), max_tokens=8).context(request_of("u:hi"))


class TestPlainPrompts:
    def test_text_extends_its_recorded_prompt_and_answer(self):
        def encode(text, special):
            return [*([1] if special else []), *(ord(item) for item in text)]

        transcript = Transcript(CharBridge(), encode=encode)
        context = transcript.context(TurnRequest(prompt="a b"))
        transcript.add_answer(context, "1", response_of(" c d"), {"role": "assistant", "content": "cd"})
        later = transcript.context(TurnRequest(prompt="a bcd e"))
        assert later.token_ids == [1, *(ord(each) for each in "a b c d e")]
        assert not later.is_fork

    def test_token_ids_extend_equal_token_ids(self):
        transcript = Transcript(CharBridge())
        transcript.add_answer(
            transcript.context(TurnRequest(prompt=(1, 2))), "1", response_of("x"), {"role": "assistant", "content": "x"}
        )
        later = transcript.context(TurnRequest(prompt=(1, 2, ord("x"), 5)))
        transcript.add_answer(later, "2", response_of("y"), {"role": "assistant", "content": "y"})
        assert transcript.num_forks == 0
        assert len(transcript.tree.leaves()) == 1

    def test_text_without_a_tokeniser_is_refused(self):
        with raises_code("agent.plain_prompt"):
            Transcript(CharBridge()).context(TurnRequest(prompt="hi"))


def stripped(on_drift: str, *, thought: str = "hm") -> Transcript:
    """A template that strips reasoning once a user message follows."""
    transcript = Transcript(CharBridge(strips=True), on_drift=on_drift)  # pyright: ignore[reportArgumentType]
    first = answer(transcript, request_of("u:hi"), f"{thought}!okay indeed>", "1")
    messages = (*messages_of("u:hi"), first, *messages_of("u:go"))
    answer(transcript, TurnRequest(messages=messages), "fine>", "2")
    return transcript


class TestDrift:
    def test_fork_keeps_both_branches_and_shares_their_prefix(self):
        transcript = stripped("fork")
        assert branches(transcript) == ["<uhi><ahm!okay indeed>", "<uhi><aokay indeed><ugo><afine>"]
        assert (transcript.num_turns, transcript.num_forks, transcript.num_drifts) == (2, 1, 1)

    def test_realign_overwrites_a_short_difference_and_keeps_what_agrees(self):
        transcript = stripped("realign")
        assert branches(transcript) == ["<uhi><aokay indeed><ugo><afine>"]
        (leaf,) = transcript.tree.leaves()
        generated = [(node.turn_id, text_of(node.token_ids)) for node in path_to(leaf) if node.is_generated]
        assert generated == [("1", "okay indeed>"), ("2", "fine>")]
        kept = [node for node in path_to(leaf) if node.is_generated]
        assert all(list(node.logprobs) == pytest.approx([-item / 1000 for item in node.token_ids]) for node in kept)
        assert (transcript.num_forks, transcript.num_drifts) == (0, 1)

    def test_several_answers_to_a_context_realign_it_once(self):
        transcript = Transcript(CharBridge(strips=True), on_drift="realign")
        first = answer(transcript, request_of("u:hi"), "hm!", "1", stop_reason="length")
        context = transcript.context(TurnRequest(messages=(*messages_of("u:hi"), first, *messages_of("u:go"))))
        for turn_id in ("2", "3"):
            transcript.add_answer(context, turn_id, response_of("ok>"), {"role": "assistant", "content": "ok"})
        assert branches(transcript) == ["<uhi><a><ugo><aok>"] * 2
        assert transcript.num_overwritten == len("hm!")

    def test_realign_forks_where_the_difference_is_long(self):
        transcript = stripped("realign", thought="h" * 80)
        assert len(branches(transcript)) == 2
        assert (transcript.num_forks, transcript.num_drifts) == (1, 1)

    def test_realign_forks_where_another_branch_has_the_tokens(self):
        transcript = Transcript(CharBridge(strips=True), on_drift="realign")
        first = answer(transcript, request_of("u:hi"), "hm!okay indeed>", "1")
        answer(transcript, TurnRequest(messages=(*messages_of("u:hi"), first, *messages_of("t:3"))), "t>", "2")
        answer(transcript, TurnRequest(messages=(*messages_of("u:hi"), first, *messages_of("u:go"))), "fine>", "3")
        assert branches(transcript) == ["<uhi><ahm!okay indeed><t3><at>", "<uhi><aokay indeed><ugo><afine>"]

    def test_turns_after_a_realignment_extend_it(self):
        transcript = stripped("realign")
        first = {"role": "assistant", "content": "okay indeed", "reasoning_content": "hm"}
        messages = (*messages_of("u:hi"), first, *messages_of("u:go", "a:fine", "t:3"))
        answer(transcript, TurnRequest(messages=messages), "end>", "3")
        assert branches(transcript) == ["<uhi><aokay indeed><ugo><afine><t3><aend>"]
        assert (transcript.num_forks, transcript.num_drifts) == (0, 1)

    def test_reject_refuses_the_turn_and_changes_nothing(self):
        with raises_code("agent.drift"):
            stripped("reject")

    def test_a_full_rendering_that_extends_the_tokens_is_no_drift(self):
        """The bridge has no proof for this turn, but the tokens agree."""
        transcript = Transcript(CharBridge(strips=True))
        answer(transcript, request_of("u:hi"), "ok>", "1")
        later = transcript.context(request_of("u:hi", "a:ok", "u:go"))
        assert later.after is transcript.turns["1"].node
        assert (later.is_fork, later.is_drift) == (False, False)

    def test_an_answer_that_the_client_changed_is_drift(self):
        transcript = Transcript(CharBridge())
        answer(transcript, request_of("u:hi"), "ok>", "1")
        later = transcript.context(request_of("u:hi", "a:okay", "u:go"))
        assert (text_of(later.token_ids), later.is_drift, later.is_fork) == ("<uhi><aokay><ugo><a", True, True)

    def test_a_changed_answer_keeps_the_tokens_of_the_answers_before_it(self):
        transcript = Transcript(CharBridge())
        context = transcript.context(request_of("u:hi"))
        transcript.add_answer(context, "1", response_of("O K>"), {"role": "assistant", "content": "OK"})
        answer(transcript, request_of("u:hi", "a:OK", "u:go"), "ok>", "2")
        later = transcript.context(request_of("u:hi", "a:OK", "u:go", "a:other", "u:so"))
        assert text_of(later.token_ids) == "<uhi><aO K><ugo><aother><uso><a"
        assert (later.is_drift, later.is_fork) == (True, False)


class TestMessageKey:
    def test_absent_and_empty_fields_and_spellings_of_arguments_are_equal(self):
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
        other = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"b": 2, "a": 1}}}
        first = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
        second = {"role": "assistant", "content": "", "tool_calls": [other]}
        assert message_key(first) == message_key(second)

    @pytest.mark.parametrize("change", [{"content": "b"}, {"role": "user"}, {"reasoning_content": "x"}, {"name": "n"}])
    def test_other_messages_differ(self, change):
        message = {"role": "assistant", "content": "a"}
        assert message_key(message) != message_key(message | change)
