#!/usr/bin/env bash
# tokenizers with byte fallback: a broken byte changes the text before it, and DecodeStream raises at the next token.
#
# Version: tokenizers 0.23.3, Python 3.11, Linux.
#
# Assumption: the text of more tokens begins with the text of the first ones, up to half a character; DecodeStream, which
# is made for streams, decodes every sequence of token ids that `decode` does.
#
# Behaviour: the decoder joins neighbouring byte tokens, and writes one U+FFFD for each of them when not all of them
# together are UTF-8. A character that was decoded, "€", becomes three U+FFFD once a byte follows that begins no
# character. DecodeStream has returned "€" by then, and raises at the first token after the byte, and at all later ones.
#
# Output seen:
#   the characters: "€"; and one byte: "����"; DecodeStream: ["€", "raises", "raises"]
#
# Why it matters: Llama 2, Mistral and Gemma tokenize rare characters in this way, and a policy that is sampled writes
# such bytes. A server that streams through DecodeStream ends the answer with an error; the text that a client assembled
# and the text of the whole answer, which a reward function reads, differ in characters that were right.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check tokenizers==0.23.3
seen=$("$folder/env/bin/python" - <<'PYTHON'
import json
from tokenizers import Tokenizer, decoders, models

vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<unk>": 256, "a": 257}
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
euro = list("€".encode())
broken = [*euro, euro[0]]
stream, steps = decoders.DecodeStream(skip_special_tokens=False), []
for token_id in [*broken, 257, 257]:
    try:
        steps.append(stream.step(tokenizer, token_id))
    except Exception:
        steps.append("raises")
show = lambda value: json.dumps(value, ensure_ascii=False)
print(f"the characters: {show(tokenizer.decode(euro))}; and one byte: {show(tokenizer.decode(broken))}; "
      f"DecodeStream: {show([step for step in steps if step])}")
PYTHON
)
echo "$seen"
expected='the characters: "€"; and one byte: "����"; DecodeStream: ["€", "raises", "raises"]'
[ "$seen" = "$expected" ] || { echo "expected: $expected"; exit 1; }
