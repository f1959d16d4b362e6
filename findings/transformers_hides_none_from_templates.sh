#!/usr/bin/env bash
# transformers leaves out a message's keys with None before it renders: templates that test for none lose tool calls.
#
# Version: transformers 5.23.0 with jinja2 3.1.6, Python 3.11, Linux.
#
# Assumption: `apply_chat_template` gives the template the message as the caller has it. OpenAI's form of an answer that
# only calls tools has `content: null`, and templates test for it: that of DeepSeek-V3 writes the calls of an answer in
# the branch `message['content'] is none`.
#
# Behaviour: the key is removed. In Jinja a missing key is no none, so the test is false, the branch is skipped, and the
# call is not in the text. There is no error and no warning, and no content brings the call back: "" is no none either.
#
# Output seen:
#   seen: [{"empty": false, "none": false}, {"empty": false, "none": true}]: whether the call is in the text of
#   apply_chat_template, and in that of the template alone
#
# Why it matters: a training row whose answer is such a call trains the end token alone, and the prompt of the next turn
# of a tool loop shows a result without its call. Render the call with a placeholder first, and refuse it by name when the
# placeholder is not in the text.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.23.0 jinja2==3.1.6
seen=$("$folder/env/bin/python" - <<'PYTHON'
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
], sort_keys=True))
PYTHON
)
echo "seen: $seen"
expected='[{"empty": false, "none": false}, {"empty": false, "none": true}]'
[ "$seen" = "$expected" ] || { echo "expected: $expected"; exit 1; }
