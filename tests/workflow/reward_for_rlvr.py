"""Rewards of the tests of this folder; in a separate file, so that workers import nothing else."""


def length_reward(prompt, completion, prompt_ids, completion_ids, *, prompts, **row):
    """Shows what it was called with."""
    assert prompts == []
    if completion == "bad":
        raise ValueError("bad answer")
    assert len(completion_ids) >= len(completion)
    return len(completion) + 10 * len(prompt_ids) + 1000 * prompt.count("?")


def answer_reward(prompt, completion, prompt_ids, completion_ids, answer, images=None):
    assert images is None
    assert min(prompt_ids) >= 0
    return float(completion == answer)


def always_one(prompt, completion, prompt_ids, completion_ids, **row):
    return 1.0
