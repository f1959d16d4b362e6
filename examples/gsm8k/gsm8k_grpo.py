"""GRPO on GSM8K: the script that every process of the run executes; PPOTrainer knows which one it is in.

areal run examples/gsm8k/gsm8k_grpo.py --config examples/gsm8k/gsm8k_grpo.yaml
"""

import sys

from areal import GRPOConfig, PPOTrainer, RLVRWorkflow, load_config, load_rows, tokenizer_of
from areal.reward.math_answer import answers_equal, extract_answer


def gsm8k_reward(prompt, completion, prompt_ids, completion_ids, answer, **row):
    """1 when the final number of the completion is that of the dataset's `answer`; runs in a worker process."""
    answered, wanted = extract_answer(completion), extract_answer(answer)
    return float(answered is not None and answers_equal(answered, wanted))


def main(argv: list[str]) -> None:
    config = load_config(argv, GRPOConfig)
    tokenizer = tokenizer_of(config, config.actor.path)
    train_rows = load_rows(config.train_dataset, default_split="train", tokenizer=tokenizer)
    valid_rows = load_rows(config.valid_dataset, default_split="test", tokenizer=tokenizer)
    workflow = RLVRWorkflow(gsm8k_reward, config.gconfig, tokenizer, reward=config.reward)
    with PPOTrainer(config, train_dataset=train_rows, valid_dataset=valid_rows) as trainer:
        trainer.train(workflow)


if __name__ == "__main__":
    main(sys.argv[1:])
