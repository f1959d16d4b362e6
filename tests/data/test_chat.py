from areal.data.chat import encode_prompt
from tests.expect import raises_code

CHAT = [{"role": "user", "content": "Hi"}]


def test_messages_through_the_template(tokenizer):
    prompt = encode_prompt({"messages": CHAT}, tokenizer)
    assert prompt.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(prompt.token_ids) == prompt.text
    assert tokenizer.eos_token_id in prompt.token_ids


def test_plain_text(tokenizer):
    assert encode_prompt({"prompt": "1+1="}, tokenizer).token_ids == tokenizer.encode("1+1=")


def test_a_tokenizer_without_template_is_refused(tokenizer_folder, tmp_path):
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_folder / "tokenizer.json"))
    with raises_code("data.chat_template"):
        encode_prompt({"messages": CHAT}, plain)
