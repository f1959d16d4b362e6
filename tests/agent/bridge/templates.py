"""Chat templates of our own, one for each construct of real templates that matters to a bridge."""

HEAD = (
    "{%- if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif -%}"
)
USER = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
THOUGHT = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": ARGUMENTS}</tool_call>{% endfor %}'
)
AS_TEXT, AS_JSON = "{{ c.function.arguments }}", "{{ c.function.arguments | tojson }}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chatml(
    *,
    head: str = HEAD,
    user: str = USER,
    thought: str = THOUGHT,
    calls: str = CALLS,
    arguments: str = AS_TEXT,
    end: str = "<|im_end|>\n",
    tool: str = USER,
    prompt: str = PROMPT,
    before: str = "",
) -> str:
    """A template with `<|im_start|>` headers, of which one part is replaced."""
    answer = f"<|im_start|>assistant\n{thought}{{{{ m.content }}}}{calls.replace('ARGUMENTS', arguments)}{end}"
    return (
        f"{before}{head}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{answer}"
        f"{{% elif m.role == 'tool' %}}{tool}{{% else %}}{user}{{% endif %}}{{% endfor %}}{prompt}"
    )


LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
AFTER_LAST_QUESTION = "{% if loop.index0 > ns.last %}" + THOUGHT + "{% endif %}"
COMPARED = chatml(
    head="",
    user="{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% if m == users[-1] and tools %}{{ tools | tojson }}{% endif %}" + USER,
)
RUNNING_IDS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}:{{ ids.next }}{{ c.function.arguments }}"
    "</tool_call>{% set ids.next = ids.next + 1 %}{% endfor %}"
)
CHATML = chatml()
THINKING_STRIPPED = chatml(before=LAST_QUESTION, thought=AFTER_LAST_QUESTION)
LAST_TURN_DIFFERS = chatml(thought="{% if loop.last %}<think>\n\n</think>\n\n{% endif %}")
EMPTY_THOUGHT = chatml(
    prompt=PROMPT.replace("{% endif %}", "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}")
)
OPEN_THOUGHT = chatml(
    thought="<think>\n{{ m.reasoning_content }}\n</think>\n\n",
    prompt=PROMPT.replace("{% endif %}", "<think>\n{% endif %}"),
)
XML_CALLS = chatml(
    calls="{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function>"
    "</tool_call>{% endfor %}"
)
MOVED_TOOLS = chatml(
    before=LAST_QUESTION,
    head="",
    user="{% if loop.index0 == ns.last and tools %}{{ tools | tojson }}{% endif %}" + USER,
)
MOVED_SYSTEM = chatml(
    before=LAST_QUESTION,
    user="{% if m.role == 'user' %}{% if loop.index0 == ns.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}\n{% endif %}" + USER + "{% endif %}",
)
CALL_IDS = chatml(before="{% set ids = namespace(next=0) %}", calls=RUNNING_IDS)
NEWLINE_UNLESS_LAST = chatml(tool="<|im_start|>tool\n{{ m.content }}<|im_end|>{{ '' if loop.last else '\n' }}")
ARGUMENTS_ESCAPED = chatml(arguments=AS_JSON)
ARGUMENTS_MAPPING = chatml(arguments="{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}")
ARGUMENTS_ADDED = chatml(arguments="{{ '' + c.function.arguments }}")
DATED = chatml(head="<|im_start|>system\nToday is {{ strftime_now('%d %b %Y') }}.<|im_end|>\n" + HEAD)
NO_PROMPT = chatml(prompt="")
OTHER_END = chatml(end="{% if loop.last %}<|return|>{% else %}<|im_end|>{% endif %}\n")
FORBIDDEN = chatml(before="{% set seen = [] %}{% set _ = seen.append(1) %}")
HEADER_ENDS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    + CALLS.replace("ARGUMENTS", AS_TEXT)
    + "{% elif m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}{# <|user|> <|observation|> #}"
)
ONE_CALL = chatml(
    calls="{% if (m.tool_calls or []) | length > 1 %}{{ raise_exception('one call') }}{% endif %}" + CALLS
)
FORBIDDEN_CALLS = chatml(calls="{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}")
NO_USER_AFTER_TOOL = chatml(
    user="{% if not loop.first and messages[loop.index0 - 1].role == 'tool' %}"
    "{{ raise_exception('no user after a tool') }}{% endif %}" + USER
)
PARTS = chatml(user="<|im_start|>{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}<|im_end|>\n").replace(
    "{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"
)
INLINE_THOUGHT = chatml(thought="").replace(
    "assistant\n{{ m.content }}", "assistant\n{{ m.content.split('</think>')[-1] if loop.last else m.content }}"
)
TAIL_DIFFERS = chatml(end="{% if m.content | length > 25 %} {% endif %}<|im_end|>{{ m.content | length }}\n")
TEXT_HIDES_CALLS = chatml(calls="{% if not m.content %}" + CALLS + "{% endif %}")
SHAPED_LIKE_RESULT = chatml(
    before="{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' and not "
    "m.content.startswith('<tool_response>') %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}",
    thought=AFTER_LAST_QUESTION,
)
