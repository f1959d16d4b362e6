"""The program of the harness."""

CHAT_PROGRAM_SOURCE = """
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from verifiers import v1


class Compactor:
    def __init__(self, client, model, tools, enabled, threshold):
        self.client, self.model = client, model


async def connect_mcp(config, stack, reserved):
    return [], {}, {}


async def run_chat_loop(args, compactor, messages, dispatch, servers, http):
    asked = {"model": compactor.model, "messages": messages}
    answer = await compactor.client.chat.completions.create(**asked)
    v1.REPLIES.append(answer.choices[0].message.content)
"""


def message_to_wire(message):
    return message
