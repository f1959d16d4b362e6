"""A client of the Tinker SDK: trains an adapter for some steps, prints the number of each step once its requests are
sent, and saves the weights. The last line of the output is JSON: the path, and an answer that is sampled from them.

    python sdk_steps.py STEPS
"""

import json
import random
import sys

import numpy as np
import tinker
from tinker import types

VOCABULARY = 40


def datum(draw: random.Random) -> types.Datum:
    tokens = [draw.randrange(VOCABULARY) for _ in range(draw.randrange(4, 12))]
    inputs = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "weights": np.array([draw.random() for _ in tokens[1:]], np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    draw = random.Random(1)
    client = tinker.ServiceClient().create_lora_training_client("tiny", rank=8, seed=3).result()
    for number in range(int(sys.argv[1])):
        passes = [client.forward_backward([datum(draw), datum(draw)], "cross_entropy") for _ in range(2)]
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        for item in (*passes, step):
            item.result()
    path = client.save_state("last").result().path
    sampler = client.save_weights_and_get_sampling_client()
    settings = types.SamplingParams(max_tokens=8, seed=1)
    answer = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), num_samples=1, sampling_params=settings).result()
    sys.stdout.write(json.dumps({"path": path, "tokens": list(answer.sequences[0].tokens)}))


main()
