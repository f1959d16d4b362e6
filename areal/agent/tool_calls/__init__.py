"""Splits the text of an answer into reasoning, text and tool calls, by the style of the model's chat template."""

from areal.agent.tool_calls.split import STYLES, AnswerStyle, SplitAnswer, special_tokens, split_answer, style_of

__all__ = ["STYLES", "AnswerStyle", "SplitAnswer", "special_tokens", "split_answer", "style_of"]
