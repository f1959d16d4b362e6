"""transformers leaves out a message's keys with None before it renders: templates that test for none lose tool calls.

Version: transformers 5.23.0 with jinja2 3.1.6, Python 3.11, Linux.

Assumption: `apply_chat_template` gives the template the message as the caller has it. OpenAI's form of an answer that
only calls tools has `content: null`, and templates test for it: that of DeepSeek-V3 writes the calls of an answer in
the branch `message['content'] is none`.

Behaviour: the key is removed. In Jinja a missing key is no none, so the test is false, the branch is skipped, and the
call is not in the text. There is no error and no warning, and no content brings the call back: "" is no none either.

Output seen: "calls in the text: {'none': False, 'empty': False}, the template alone: {'none': True, 'empty': False}".

Why it matters: a training row whose answer is such a call trains the end token alone, and the prompt of the next turn
of a tool loop shows a result without its call. Render the call with a placeholder first, and refuse it by name when the
placeholder is not in the text.

    python findings/transformers_hides_none_from_templates.py     # exit 0 while this holds, 1 otherwise
"""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PACKAGES = ("transformers==5.23.0", "jinja2==3.1.6")
PROGRAM = """
import json, jinja2
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    "{% for call in message['tool_calls'] %}<call>{{ call['function']['name'] }}{% endfor %}"
    "{% else %}{{ message['content'] }}{% endif %}<end>{% endfor %}"
)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
tokenizer.chat_template = TEMPLATE

def dialogue(content):
    call = {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return [{"role": "user", "content": "Look."}, {"role": "assistant", "content": content, "tool_calls": [call]}]

contents = {"none": None, "empty": ""}
print(json.dumps([
    {name: "<call>look" in tokenizer.apply_chat_template(dialogue(content), tokenize=False)
     for name, content in contents.items()},
    {name: "<call>look" in jinja2.Template(TEMPLATE).render(messages=dialogue(content))
     for name, content in contents.items()},
]))
"""
EXPECTED = [{"none": False, "empty": False}, {"none": True, "empty": False}]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        venv.create(Path(name) / "env", with_pip=True)
        python = Path(name) / "env" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True)
        done = subprocess.run([python, "-c", PROGRAM], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"calls in the text: {found[0]}, the template alone: {found[1]}\n")
    return 0 if found == EXPECTED else 1


if __name__ == "__main__":
    sys.exit(main())
