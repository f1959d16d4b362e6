#!/usr/bin/env bash
# transformers: when truncation at the left cuts the first answer, the assistant mask leaves out all other answers too.
#
# Version: transformers 5.23.0 with tokenizers 0.23.3, jinja2 3.1.6 and numpy 2.3.5, Python 3.11, Linux.
#
# Assumption: apply_chat_template(..., return_assistant_tokens_mask=True) marks the tokens that the template's
# {% generation %} blocks wrote. Truncation removes tokens with their marks; the marks of the tokens that stay remain.
#
# Behaviour: with truncation_side="left", as soon as the first token of the first answer is cut, the mask is zero for
# the whole dialogue, also for later answers that are complete. With truncation at the right the mask is right.
#
# Output seen (tokens of a dialogue with three answers, of which answers wrote, and marks):
#   right: 60/30/30 50/20/20 45/20/20 30/10/10
#   left: 60/30/30 50/30/30 45/25/0 30/20/0
#
# Why it matters: truncation at the left keeps the latest turns, so it is the usual side for dialogues of several turns
# that are too long. Supervised training on this mask, or the mask of a loss in RL, drops just these long dialogues
# without a word: they cost their forward pass, count in the batch and train nothing.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3 \
    jinja2==3.1.6 numpy==2.3.5
export HF_HOME="$folder/home" HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
seen=$("$folder/env/bin/python" -W ignore - <<'PYTHON'
import tokenizers
import transformers

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
characters = {chr(code): index for index, code in enumerate(range(32, 127))}
model = tokenizers.models.BPE(vocab=characters, merges=[])
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
# One character is one token: questions of lower case, answers of upper case.
dialogue = [
    {"role": role, "content": letter * 10}
    for role, letter in zip(("user", "assistant") * 3, "qArBsC")
]
for side in ("right", "left"):
    tokenizer.truncation_side = side
    counts = []
    for length in (60, 50, 45, 30):
        encoded = tokenizer.apply_chat_template(
            dialogue, chat_template=TEMPLATE, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            truncation=True, max_length=length)
        text = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
        counts.append(f"{len(text)}/{sum(map(str.isupper, text))}/{sum(encoded['assistant_masks'])}")
    print(f"{side}:", *counts)
PYTHON
)
echo "$seen"
expected='right: 60/30/30 50/20/20 45/20/20 30/10/10
left: 60/30/30 50/30/30 45/25/0 30/20/0'
[ "$seen" = "$expected" ] || { echo "expected:"; echo "$expected"; exit 1; }
