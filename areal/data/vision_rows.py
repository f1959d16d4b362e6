"""Rows of public datasets with images, as chats that ask for an answer in the form that their reward reads."""

from areal.data.row_files import Row


_COUNT = "\n\nCount the objects. Write only their number in square brackets, like: [7]"
_FORMULA = "\n\nThink step by step. Write the final answer in a box, like: \\boxed{42}"


def clevr_count_row(row: Row) -> Row:
    """A row of clevr_count_70k (images, problem, answer); its answer becomes `[n]`."""
    return _chat(row, "problem", "images", _COUNT, f"[{str(row['answer']).strip(' []')}]")


def geometry3k_row(row: Row) -> Row:
    r"""A row of geometry3k (images, problem, answer); its answer becomes `\boxed{answer}`."""
    return _chat(row, "problem", "images", _FORMULA, _boxed(row["answer"]))


def virl39k_row(row: Row) -> Row:
    r"""A row of ViRL39K (image, question, answer); its answer becomes `\boxed{answer}`."""
    return _chat(row, "question", "image", _FORMULA, _boxed(row["answer"]))


def _chat(row: Row, question: str, images: str, instruction: str, answer: str) -> Row:
    """`question` and `images` are columns, which `messages` and the column `images` replace; the others stay."""
    others = {name: value for name, value in row.items() if name not in (question, images)}
    message = {"role": "user", "content": row[question] + instruction}
    return {**others, "messages": [message], "images": row[images], "answer": answer}


def _boxed(answer: Any) -> str:
    text = str(answer).strip()
    return text if "\\boxed" in text else f"\\boxed{{{text}}}"
