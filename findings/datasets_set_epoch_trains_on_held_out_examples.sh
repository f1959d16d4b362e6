#!/usr/bin/env bash
# datasets: set_epoch() on the part of a shuffled stream that skip() left makes it return the examples that take() held.
#
# Version: datasets 5.2.0 with numpy 2.3.5 and pyarrow 26.0.1, Python 3.11, Linux.
#
# Assumption: `stream.take(100)` and `stream.skip(100)` of one shuffled stream with a fixed seed are a split: an example
# that is in the first part is in the second part in no epoch.
#
# Behaviour: both parts only count examples of the stream as it is shuffled at the time. set_epoch() shuffles the stream
# before the count anew, so from epoch 1 on the second part leaves out 100 other examples and returns nearly all that
# were held out. set_epoch() on both parts exchanges the held-out examples for ones that were trained on. A split before
# the shuffle stays one.
#
# Output seen (examples of the training part in epochs 0, 1 and 2 of 1000 with 100 held out, and held-out ones in it):
#   shuffle, then split: 900/0 900/94 900/89
#   split, then shuffle: 900/0 900/0 900/0
#   held-out examples of epoch 1 that were trained on in epoch 0: 94
#
# Why it matters: the library's page about streaming advises to shuffle before the split, and trainers call set_epoch()
# themselves (accelerate's loaders, and so transformers' Trainer, for any data set that has it). From the second epoch
# on the evaluation is of examples that were trained on; the sizes stay right, and nothing is logged.
#
# Exit status: 0 while this holds, 1 otherwise.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install -qq --disable-pip-version-check datasets==5.2.0 numpy==2.3.5 pyarrow==26.0.1
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 "$folder/env/bin/python" -W ignore - <<'PYTHON'
import datasets


def stream():
    return datasets.Dataset.from_dict({"id": list(range(1000))}).to_iterable_dataset(num_shards=4)


def shuffled(part):
    return part.shuffle(seed=42, buffer_size=1000)


def ids(part, epoch):
    part.set_epoch(epoch)
    return [row["id"] for row in part]


def epochs(training, held_out):
    held, counts = set(ids(held_out, 0)), []
    for epoch in range(3):
        seen = ids(training, epoch)
        assert len(held) == 100 and len(set(seen)) == len(seen)
        counts.append((len(seen), len(held.intersection(seen))))
    return counts


both = shuffled(stream())
late, early = epochs(both.skip(100), both.take(100)), epochs(shuffled(stream().skip(100)), stream().take(100))
trained = len(set(ids(both.skip(100), 0)).intersection(ids(both.take(100), 1)))
print("shuffle, then split:", *(f"{size}/{held}" for size, held in late))
print("split, then shuffle:", *(f"{size}/{held}" for size, held in early))
print("held-out examples of epoch 1 that were trained on in epoch 0:", trained)
holds = late[0] == (900, 0) and all(size == 900 and held > 50 for size, held in late[1:]) and trained > 50
raise SystemExit(0 if holds and early == [(900, 0)] * 3 else 1)
PYTHON
