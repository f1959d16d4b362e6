"""The form in which an answer is delivered, and in which a client sends it back."""

from areal.agent.turns import Message, TurnAnswer


def answer_message(answer: TurnAnswer) -> Message:
    """The assistant message of an answer, as every dialect delivers it and reads it back."""
    message: Message = {"role": "assistant", "content": answer.text or None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message
