#!/usr/bin/env bash
# math-verify adds groups of digits that a thin space separates: it reads 1\,234 as 235.
#
# Version: math-verify 0.9.0 with latex2sympy2_extended 1.11.0, sympy 1.14.0, Python 3.11, Linux.
#
# Assumption: the separators of thousands that LaTeX texts use (`{,}`, `\!` after a comma, `\,`) are left out of a number.
#
# Behaviour: `{,}` and `\!` are left out. `\,` becomes a space, and a number after a number is added to it, as in a mixed
# number: 1\,234 is 1 + 234. A gold answer of 235 accepts the answer 1\,234, and that of 1234 refuses it. There is no
# warning.
#
# Output seen: as in `expected` below: what parse() makes of each text
#
# Why it matters: models write 1\,234 in boxes, as style guides of science ask. The reward pays the wrong number, and
# does not pay the right one. Join groups of three digits before the library reads them.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check math-verify==0.9.0 \
    latex2sympy2_extended==1.11.0 sympy==1.14.0 antlr4-python3-runtime==4.13.2
seen=$("$folder/env/bin/python" - <<'PYTHON'
from math_verify import parse, verify

for text in (r"1{,}234", r"1,\!234", r"1\,234", r"12\,345"):
    print(text, parse(f"\\boxed{{{text}}}")[0])
given = parse(r"\boxed{1\,234}")
print("verify:", verify(parse("$235$"), given), verify(parse("$1234$"), given))
PYTHON
)
echo "$seen"
expected='1{,}234 1234
1,\!234 1234
1\,234 235
12\,345 357
verify: True False'
[ "$seen" = "$expected" ] || { echo "expected:"; echo "$expected"; exit 1; }
