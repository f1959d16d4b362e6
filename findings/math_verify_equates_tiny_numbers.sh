#!/usr/bin/env bash
# math-verify takes all decimals below half a millionth for equal, and a fraction for a decimal that is off by 0.1%.
#
# Version: math-verify 0.9.0 with latex2sympy2_extended 1.11.0, sympy 1.14.0, Python 3.11, Linux.
#
# Assumption: `verify(gold, answer)` compares numbers with a precision that depends on their size, so that an electron's
# charge does not answer the question for its mass.
#
# Behaviour: where one side is a decimal, both are rounded to `float_rounding=6` places after the point before they are
# compared. Numbers of the size of physical constants all become 0.000000, and 1/3000 equals 0.000333. Numbers that are
# written as powers only (10^{-7}) are exact and stay different.
#
# Output seen: as in `expected` below: gold, answer, result of verify
#
# Why it matters: a reward from it pays any small number for any other, and questions of physics and chemistry teach the
# policy nothing. Compare with a relative tolerance before the library is asked.
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

PAIRS = (
    (r"1.602\times10^{-19}", r"9.109\times10^{-31}"), (r"\frac{1}{3000}", "0.000333"), ("(0.0000001,2)", "(0.0000002,2)"),
    ("10^{-7}", "10^{-8}"), ("0.5", "0.50001"),
)
for gold, answer in PAIRS:
    print(gold, answer, verify(parse(f"${gold}$"), parse(f"${answer}$")))
PYTHON
)
echo "$seen"
expected='1.602\times10^{-19} 9.109\times10^{-31} True
\frac{1}{3000} 0.000333 True
(0.0000001,2) (0.0000002,2) True
10^{-7} 10^{-8} False
0.5 0.50001 False'
[ "$seen" = "$expected" ] || { echo "expected:"; echo "$expected"; exit 1; }
