#!/usr/bin/env bash
# datasets makes datetimes of JSON texts, and inexact floats of JSON integers, depending on the other rows of the file.
#
# Version: datasets 5.2.0 with pyarrow 26.0.1 and pandas 3.1.1, Python 3.11, Linux.
#
# Assumption: load_dataset("json") gives a text as a text and an integer as an integer, whatever the other rows hold, as
# json.loads does.
#
# Behaviour: where all texts of a column look like dates, all become datetimes; one other text keeps them all. One integer
# above 2^63-1 makes floats of the whole column, and integers above 2^53 lose their last digit. There is no warning.
#
# Output seen: as in `expected` below: the column `answer` of four files of two rows
#
# Why it matters: a reward compares the answer 2024-01-05 with "2024-01-05 00:00:00", or 9007199254740993 with
# 9007199254740992.0, and scores right answers 0; whether it does depends on rows that were added to the file. Read such
# files without the library, or refuse answers of these types.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1
export HF_HUB_OFFLINE=1 HF_HOME="$folder/hf"
printf '%s\n' '{"answer": "2024-01-05"}' '{"answer": "2023-11-30"}' >"$folder/dates.jsonl"
printf '%s\n' '{"answer": "2024-01-05"}' '{"answer": "Paris"}' >"$folder/mixed.jsonl"
printf '%s\n' '{"answer": 9007199254740993}' '{"answer": 9223372036854775808}' >"$folder/large.jsonl"
printf '%s\n' '{"answer": 9007199254740993}' '{"answer": 2}' >"$folder/small.jsonl"
cd "$folder"
seen=$("$folder/env/bin/python" - <<'PYTHON'
from datasets import disable_progress_bars, load_dataset

disable_progress_bars()
for name in ("dates", "mixed", "large", "small"):
    print(name, *(repr(row["answer"]) for row in load_dataset("json", data_files=f"{name}.jsonl", split="train")))
PYTHON
)
echo "$seen"
expected="dates datetime.datetime(2024, 1, 5, 0, 0) datetime.datetime(2023, 11, 30, 0, 0)
mixed '2024-01-05' 'Paris'
large 9007199254740992.0 9.223372036854776e+18
small 9007199254740993 2"
[ "$seen" = "$expected" ] || { echo "expected:"; echo "$expected"; exit 1; }
