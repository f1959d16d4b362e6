"""Sampling, limits of tokens and evaluation of ROLL."""

from areal.importers.draft import Draft
from areal.importers.roll_defaults import is_agentic


def take_sampling(draft: Draft) -> None:
    prompt, longest = _lengths(draft)
    if draft.whole("actor_infer.generating_args.top_k", -1, least=-1) > 0:
        draft.keep("actor_infer.generating_args.top_k", "gconfig.top_k")
    draft.drop("set by num_return_sequences_in_group", "actor_infer.generating_args.num_return_sequences")
    _evaluation(draft, prompt, longest)
    roles = ("actor_infer", "validation")
    draft.drop("all tokens, or one beam, as here", *(f"{role}.generating_args.top_k" for role in roles))
    beams = [f"{role}.generating_args.num_beams" for role in roles]
    draft.lack("there is no beam search", *beams, off=(1,))
    stops = "actor_infer.generating_args.stop_strings"
    if draft.get(stops):
        draft.set("gconfig.stop", draft.listed(stops), "ROLL: stop_strings", stops)


def _lengths(draft: Draft) -> tuple[int, int]:
    """Set the limits of tokens; returns those of a prompt, and of a prompt with its answer.

    An agentic file limits each turn by max_new_tokens, the RLVR pipeline ignores that key.
    """
    prompt, own = draft.whole("prompt_length", 1024), "actor_infer.generating_args.max_new_tokens"
    answer = draft.whole("response_length" if draft.get("response_length") is not None else own, 1024)
    longest = draft.whole("sequence_length", prompt + answer)
    why = "ROLL: sequence_length, else prompt_length + response_length"
    draft.set("gconfig.max_tokens", longest, why, "sequence_length")
    if is_agentic(draft.values):
        draft.set("gconfig.max_new_tokens", min(draft.whole(own, 8192), longest), "ROLL: max_new_tokens", own)
    elif draft.get("response_length") == longest - prompt:
        draft.keep("response_length", "gconfig.max_new_tokens")
    else:
        draft.set("gconfig.max_new_tokens", max(1, longest - prompt), "ROLL: sequence_length - prompt_length")
    draft.drop("the other limits of tokens decide", "response_length", own)
    return prompt, longest


def _evaluation(draft: Draft, prompt: int, longest: int) -> None:
    """`prompt`, `longest`: as `_lengths` returns them."""
    has_rows, is_on = "validation.data_args.file_name" in draft.values, draft.whole("eval_steps", 10, least=-1) > 0
    if not (has_rows and is_on):
        draft.drop("there is no evaluation" if has_rows else "there is no held-out set",
                   "validation.*", "eval_steps", "val_prompt_length", "val_sequence_length")  # fmt: skip
        return
    draft.keep("eval_steps", "evaluator.freq_steps")
    draft.set("evaluator.eval_before_train", True, "ROLL evaluates before the first step")
    for name in ("temperature", "top_p"):
        draft.keep(f"validation.generating_args.{name}", f"eval_gconfig.{name}")
    if draft.whole("validation.generating_args.top_k", -1, least=-1) > 0:
        draft.keep("validation.generating_args.top_k", "eval_gconfig.top_k")
    keys = ("val_sequence_length", "val_prompt_length")
    if draft.get(keys[0]) is not None:
        longest, before = draft.whole(keys[0], longest), draft.whole(keys[1], prompt)
    else:
        before = prompt
    why = "ROLL: val_sequence_length, else as in training"
    draft.set("eval_gconfig.max_new_tokens", max(1, longest - before), why, *keys)
    draft.set("eval_gconfig.max_tokens", longest, why, keys[0])
    draft.set("valid_dataset.max_length", prompt, "ROLL: prompt_length")
    draft.drop("the other limits of tokens decide", "validation.generating_args.max_new_tokens")
