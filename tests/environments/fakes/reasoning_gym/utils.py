"""Extraction of answers."""


def extract_answer(text):
    inside = text.rpartition("<answer>")[2].partition("</answer>")
    return inside[0].strip() if "<answer>" in text and inside[1] else None
