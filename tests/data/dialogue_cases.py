"""Row forms of supervised fine-tuning, and the check that every one is what the chat template writes."""

import json

from areal.api.errors import InputError
from areal.data.chat_template import dialogue_template
from areal.data.supervised_rows import EncodedRow, encode_sft_row

SYSTEM, QUESTION = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "four"}
THOUGHT = {"role": "assistant", "content": "four", "reasoning_content": "sum\nthem"}
ARGUMENTS = {"city": "Paris", "days": 3}


def calling(arguments=ARGUMENTS, **fields) -> dict:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "sunny"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
DIALOGUES = {
    "question": [QUESTION, ANSWER],
    "system": [SYSTEM, QUESTION, ANSWER],
    "two answers": [QUESTION, ANSWER, QUESTION, ANSWER],
    "thinking": [QUESTION, THOUGHT],
    "thinking after a turn": [QUESTION, ANSWER, QUESTION, THOUGHT],
    "thinking twice": [QUESTION, THOUGHT, QUESTION, THOUGHT],
    "call": [QUESTION, calling()],
    "call with text": [QUESTION, calling(content="I look.")],
    "call with JSON text": [QUESTION, calling(json.dumps(ARGUMENTS))],
    "thinking call": [QUESTION, calling(reasoning_content="sum\nthem")],
    "thinking result": [QUESTION, calling(reasoning_content="look\nit up"), RESULT, THOUGHT],
    "result": [QUESTION, calling(), RESULT, ANSWER],
    "result and a turn": [QUESTION, calling(), RESULT, ANSWER, QUESTION, ANSWER],
    "opened by the assistant": [ANSWER, QUESTION, ANSWER],
}


def row_of(name: str) -> dict:
    has_calls = any("tool_calls" in message for message in DIALOGUES[name])
    return {"messages": DIALOGUES[name], **({"tools": TOOLS} if has_calls else {})}


def learned(row: EncodedRow, tokenizer) -> list[str]:
    """The texts that are trained."""
    texts, inside = [], False
    for token, on in zip(row.token_ids, row.loss_mask, strict=True):
        if on:
            texts[-1:] = [texts[-1] + tokenizer.decode([token])] if inside else [*texts[-1:], tokenizer.decode([token])]
        inside = bool(on)
    return texts


def check_whole(name: str, tokenizer) -> str:
    """Compare the last answer of a dialogue with the whole text of the template. "equal", or the code of an error."""
    row = row_of(name)
    try:
        result = encode_sft_row(row, tokenizer)
    except InputError as error:
        return error.code
    template = dialogue_template(tokenizer)
    messages = [template.template.forms.adapted(message) for message in row["messages"]]
    whole = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    assert result.token_ids[:-1] == ids[: result.num_tokens - 1]
    assert ids[result.num_tokens - 1 :][:1] in ([result.token_ids[-1]], [])  # [] where the next header is the end
    assert tokenizer.decode(ids[result.num_tokens :]).strip() == ""
    first = result.loss_mask.index(1)
    assert all(result.loss_mask[first:])
    ends = [token in template.stop_token_ids for token in result.token_ids[first:]]
    assert ends.index(True) == len(ends) - 1
    (text,) = learned(result, tokenizer)
    answer = row["messages"][-1]
    assert answer["content"] in text
    assert answer.get("reasoning_content", "") in text
    assert text.count("Paris") == len(answer.get("tool_calls", ()))
    return "equal"
