#!/usr/bin/env bash
# reasoning-gym scores the right answer of some tasks as wrong once the item has been stored as JSON.
#
# Version: reasoning-gym 0.1.25, Python 3.11, Linux.
#
# Assumption: an item is a dictionary of JSON types, so rows can be generated once, written to a JSONL file, and scored
# later from that file: score_answer gives the item's own answer the same score before and after.
#
# Behaviour: arc_agi and rearc keep their grids as tuples and compare them with tuples. JSON makes lists of them, the
# comparison fails without an error, and the item's own answer falls from 1.0 to 0.05. chain_sum is not affected.
#
# Output seen:
#   arc_agi: 1.0 -> 0.05
#   rearc: 1.0 -> 0.05
#   chain_sum: 1.0 -> 1.0
#
# Why it matters: datasets are usually prepared as JSONL, and rewards run in other processes that get rows as JSON. The
# policy is then paid 0.05 for every right answer of these tasks, and nothing fails. A row must carry the name, config,
# seed and index, and the item must be generated again where it is scored.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check reasoning-gym==0.1.25
seen=$("$folder/env/bin/python" - <<'PYTHON'
import json

import reasoning_gym

for name in ("arc_agi", "rearc", "chain_sum"):
    dataset = reasoning_gym.create_dataset(name, size=1, seed=3)
    item = dataset[0]
    stored = json.loads(json.dumps(item))
    scores = [round(dataset.score_answer(item["answer"], each), 3) for each in (item, stored)]
    print(f"{name}: {scores[0]} -> {scores[1]}")
PYTHON
)
expected="arc_agi: 1.0 -> 0.05
rearc: 1.0 -> 0.05
chain_sum: 1.0 -> 1.0"
echo "$seen"
[ "$seen" = "$expected" ] || exit 1
