"""Texts for a model that can read: prompts as dialogues, and passages of prose, code and other scripts."""

from __future__ import annotations

from typing import Any

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three kinds of fruit, separated by commas.",
    "A box has 12 eggs. Tom breaks 5 and buys 8 more. How many eggs does he have? Explain each step.",
    "Translate into Spanish: The library opens at nine.",
    "Why does ice float on water?",
    "Write a Python function that returns the larger of two numbers.",
    "Who wrote the play Hamlet, and in which century?",
    "Finish the sentence: Early in the morning the farmer",
    "Give me a title for a story about a lost key.",
    "Is 91 a prime number? Answer yes or no, with a reason.",
    "Name the four seasons in order, starting with spring.",
    "Sort these numbers from small to large: 42, 7, 19, 3.",
    "Rewrite in the past tense: She walks to the market and buys bread.",
)
SYSTEM = {"role": "system", "content": "Answer in JSON."}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


DIALOGUES: list[list[dict[str, Any]]] = [
    *([_user(text)] for text in QUESTIONS),
    [SYSTEM, _user("In Tokyo a teacher of 37 years, Ivan, feeds a hamster. Keys: name, city, age, job")],
    [SYSTEM, _user("Karl lives in Cairo with a pony. The miner is 58. Keys: pet")],
    [{"role": "system", "content": "You are a pirate. Speak like one."}, _user("Where is my hat?")],
    [_user("Pick a number."), _assistant("I pick 17."), _user("Now add 5 to it and tell me the result.")],
    [_user("Hi!"), _assistant("Hello! How can I help?"), _user("Tell me a short joke."), _assistant("Knock, knock."),
     _user("Who is there?")],
    [_user("Réponds en français : quelle est la couleur du ciel ? 🙂")],
]  # fmt: skip
"""Twenty."""

PASSAGES = (
    "The river rose during the night. By the time the bells rang for the first service, the lower road had gone, and "
    "the miller stood in his doorway with a lantern, counting the sacks that he had carried up the ladder. Nobody "
    "spoke of the bridge. It had been built by their grandfathers, out of oak, with iron bands that the smith renewed "
    "every ten years, and it had stood through worse winters than this one. But the water was brown now, and quick, "
    "and it brought whole trees with it from the hills, roots and all, that turned over slowly as they came.",
    "Photosynthesis converts light into chemical energy. In plants, chlorophyll absorbs mostly red and blue light; the "
    "energy splits water, releases oxygen, and is stored in sugars that are made from carbon dioxide.",
    "def moving_average(values, width):\n    total = 0.0\n    result = []\n    for index, value in enumerate(values):\n"
    "        total += value\n        if index >= width:\n            total -= values[index - width]\n"
    "        if index >= width - 1:\n            result.append(total / width)\n    return result\n",
    '{"order": 1042, "items": [{"sku": "A-17", "count": 3, "price": 4.5}, {"sku": "B-02", "count": 1, "price": 19.0}], '
    '"paid": true, "note": null}',
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. In May she sold "
    "48 / 2 = 24 clips. Altogether she sold 48 + 24 = 72 clips in April and May. The answer is 72.",
    "Der Zug nach Köln fährt um 7:42 Uhr von Gleis 9 ab. 東京の天気は晴れです。Καλημέρα! Сегодня холодно, −12 °C. "
    "¿Dónde está la estación? 👩‍🚀 £3.50 ½ naïve café",
    "SELECT city, COUNT(*) AS n FROM people WHERE age BETWEEN 18 AND 65 GROUP BY city HAVING COUNT(*) > 10 ORDER BY n "
    "DESC;\n\n| city | n |\n|---|---|\n| Oslo | 41 |\n| Lima | 17 |\n",
    "Yes.",
)
