"""A reward that shows what it was called with; in a separate file, so that workers import nothing else."""


def length_reward(prompt, completion, prompt_ids, completion_ids, *, prompts, **row):
    assert prompts == []
    if completion == "bad":
        raise ValueError("bad answer")
    assert len(completion_ids) >= len(completion)
    return len(completion) + 10 * len(prompt_ids) + 1000 * prompt.count("?")
