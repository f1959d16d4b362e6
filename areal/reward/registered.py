"""The reward functions, and the functions that find the final answer of a completion."""

from areal.api.registry import register

register("rewards", "none", "areal.reward.text:no_reward")
register("rewards", "exact", "areal.reward.text:exact_reward")
register("rewards", "format", "areal.reward.text:format_reward")
register("rewards", "choice", "areal.reward.text:choice_reward")
register("rewards", "gsm8k", "areal.reward.math_answer:math_reward")
register("rewards", "math", "areal.reward.math_symbolic:symbolic_math_reward")
register("rewards", "code", "areal.reward.code:code_reward")
register("rewards", "clevr_count_70k", "areal.reward.math_symbolic:count_reward")
register("rewards", "geometry3k", "areal.reward.math_symbolic:vision_math_reward")
register("rewards", "virl39k", "areal.reward.math_symbolic:vision_math_reward")

register("answers", "number", "areal.reward.math_answer:canonical_answer")
register("answers", "choice", "areal.reward.text:extract_choice")
register("answers", "text", "areal.reward.text:stripped")
