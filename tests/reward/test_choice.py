import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward.text import choice_reward, extract_choice
from tests.expect import raises_code


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is (B).", "B"), ("A is wrong, so C", "C"), (r"\boxed{\text{D}}", "D"), ("#### e", "E"),
        ("Answer: **B**", "B"), ("I think A. The answer is B because A is not", "B"), ("Nothing at all", None),
        ("The answer is not B but C", "C"), ("The answer isn't B.", None), ("The answer is not B", None),
        ("The answer is a bit unclear", None), ("The answer is C. Option A is wrong.", "C"),
        ("I think it's B, I guess", "B"), ("It is B. A good choice", "B"), ("The answer is A or B", None),
        ("The answer is B/C", None), ("\\boxed{A, B}", None), ("\\boxed{A,B}", None), ("\\boxed{AB}", None),
        ("\\boxed{\\textbf{(B)}}", "B"), ("\\boxed{\\text{B. Paris}}", "B"), ("\\boxed{b}", "B"),
        ("\\boxed{\\text{(b) Paris}}", "B"), ("\\boxed{Paris}", None), ("\\boxed{\\text{B}}. Not A", "B"),
        ("<answer>B</answer>", "B"), ("<answer> (c) </answer>", "C"), ("<answer>B or C</answer>", None),
        ("Answer: Apple", None), ("Final Answer: B", "B"), ("**Answer:** B", "B"), ("**Answer: B**", "B"),
        ("answer is: (b)", "B"), ("the answer is b", "B"), ("the answer is b.", "B"), ("answer: b\nmore", "B"),
        ("The correct option is B", "B"), ("The correct choice: B", "B"), ("the answer is option B", "B"),
        ("The answer would be B", "B"), ("I choose B", "B"), ("Option B is correct.", "B"),
        ("Choice (d) is the best", "D"), ("Because of A and B, C", "C"), ("A or B", None),
        ("(A) or option (B)", None), ("Is it A? No. Maybe B? Yes", "B"), ("rather than B, we take D", "D"),
        ("D rather than B", "D"), ("The answer is B, not C", "B"), ("The answer is B. Wait, the answer is C", "C"),
        ("The correct answer to question A is B.", "B"), ("vitamin C deficiency", "C"), ("B", "B"), ("b", "B"),
        ("(b)", "B"), ("B. Vitamin C", "C"), ("The answer is $\\boxed{B}$", "B"), ("\\boxed{B} hmm \\boxed{C}", "C"),
        ("\\boxed{B} #### C", "C"), ("\\boxed{", None), ("A", "A"), ("The answer is A.", "A"),
        ("The answer is A because", "A"), ("The answer is **(A)**", "A"), ("Answer:\nB", "B"), ("answer is $B$", "B"),
        ("The best answer is B) Paris", "B"), ("So the answer is: D. 42", "D"), ("The answer is B and C", None),
        ("The final answer is **option C**.", "C"), ("\\boxed{\\text{Option B}}", "B"),
        ("the answer is \\text{B}", "B"), ("Answer - B", "B"), ("Dr. A. J. Smith", "J"), ("The answer is A, B", None),
        ("The answer is (A), (B).", None), ("The answer is A, B, C and D", None), ("I choose A; B", None),
        ("The answer is A + B", None), ("The answer is A or maybe B", None), ("Answer: A B C D", None),
        ("A B C D", None), ("A, B", None), ("The answer is A, B is wrong", "A"), ("The answer is A, I think", "A"),
    ],
)  # fmt: skip
def test_the_letter_a_text_chooses(text, letter):
    assert extract_choice(text) == letter


@pytest.mark.parametrize(
    ("answer", "letter"),
    [("B", "B"), ("(b)", "B"), ("B. Vitamin C", "B"), ("b", "B"), ("B) x", "B"), ("\\boxed{C}", "C"), (" D ", "D")],
)
def test_the_rows_answer(answer, letter):
    for given_letter in "ABCDEFGHIJ":
        assert choice_reward("", f"The answer is {given_letter}.", [], [], answer=answer) == float(
            given_letter == letter
        )


@pytest.mark.parametrize("answer", ["Paris", "", "7", "A or B"])
def test_a_row_whose_answer_has_no_letter_is_an_error(answer):
    with raises_code("reward.bad_row"):
        choice_reward("", "B", [], [], answer=answer)


_PIECES = ["A", "b", "I", "(", ")", "answer", "is", "not", "or", "option", "choice", "\\boxed{", "}", ".", ":", "\n"]


@given(st.text(max_size=200) | st.lists(st.sampled_from(_PIECES)).map(" ".join))
def test_any_text_is_scored(text):
    assert extract_choice(text) in {None, *"ABCDEFGHIJ"}


@pytest.mark.parametrize(
    "text", ["answer " * 20_000, "(A" * 50_000, "\\boxed{" + "\\text{" * 20_000, "<answer>" * 20_000, "not A " * 20_000]
)
def test_long_junk_takes_no_long_time(text):
    began_s = time.process_time()
    extract_choice(text)
    assert time.process_time() - began_s < 2.0


@pytest.mark.parametrize("several", ["(A) or (B)", "(A)(B)(C)", "(A) (B)", "A) and B)", "(A) and (C)", "[A], [B]"])
def test_a_box_with_several_letters_in_brackets_chooses_none(several):
    assert extract_choice(f"\\boxed{{{several}}}") is None
    assert extract_choice(f"<answer>{several}</answer>") is None


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("答案是B", "B"), ("答案是B。", "B"), ("答案：B", "B"), ("正确答案为(C)。", "C"), ("选B", "B"),
        ("所以选择D。", "D"), ("答案选C", "C"), ("故选：A", "A"), ("故选A。", "A"), ("因此正确选项是B。", "B"),
        ("答えはBです", "B"), ("正解はCです。", "C"), ("答え：D", "D"), ("정답은 B입니다.", "B"),
        ("정답은B이다", "B"), ("정답: C", "C"), ("คำตอบคือB", "B"), ("คำตอบคือ ข้อ C", "C"), ("Ответ: B", "B"),
        ("La respuesta es B.", "B"), ("La réponse est (C).", "C"), ("Die Antwort ist D.", "D"),
        ("A resposta correta é B", "B"), ("b", "B"), ("b.", "B"), (" c ", "C"), ("a", "A"), ("(b)", "B"),
        ("**b**", "B"), ("d)", "D"), ("B选项正确", "B"), ("选项B正确", "B"), ("\\boxed{B}", "B"),
        ("\\boxed{选B}", "B"), ("\\boxed{B选项}", "B"), ("\\boxed{B、C}", None), ("#### 答案是B", "B"),
        ("<answer>选C</answer>", "C"), ("答案不是B", None), ("答案不是B，而是C", "C"), ("答案是A或B", None),
        ("答案是A、B", None), ("答案是B，因为A不对", "B"), ("A不对，所以选C", "C"), ("答案是AB", None),
        ("答案是Apple", None), ("DNA复制", None), ("答案是ＢＣ", None), ("答案是Ｂ", "B"), ("答案是（B）", "B"),
        ("答案是【B】", "B"), ("答案是「B」", "B"), ("正确的是B", "B"), ("답은 A 또는 B", None),
        ("クラスBの問題 答えはA", "A"), ("이유는 없다. B", "B"), ("not b", None), ("ab", None), ("x", None),
        ("option b", "B"), ("Option b is correct", "B"), ("The answer is b because", "B"),
        ("the answer is a dog", None), ("The answer is a", "A"), ("e.g. b", None), ("正确答案是：\nB", "B"),
        ("**答案：B**", "B"), ("答案：**B**", "B"), ("答案是$B$", "B"), ("答案是 \\text{B}", "B"), ("应选B项", "B"),
        ("答案为B、理由如下", "B"), ("B。", "B"), ("B：巴黎", "B"), ("B、巴黎", "B"), ("选A不选B", "A"),
    ],
)  # fmt: skip
def test_a_letter_beside_a_script_without_spaces_or_alone_is_a_choice(text, letter):
    assert extract_choice(text) == letter
