"""`areal prove-template`: which dialogues a chat template extends without a change of earlier tokens."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal.agent.bridge import Comparison, Row, Scope, TemplateBridge, compare
from areal.api.errors import ConfigError, InputError
from areal.data.chat_template import TemplateScenario
from areal.data.tiny_model import template_tokenizer
from areal.data.tokenizer import Tokenizer, load_tokenizer

_SCOPES: dict[Scope, str] = {
    "all": "every dialogue",
    "chat": "answers without calls",
    "tools": "one question, then calls and their results",
    "one-call": "as tools, with one call in an answer",
    "bare-call": "as one-call, without text in addition to the call",
}


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="areal prove-template",
        description="Prove for which dialogues the tokens of a chat template only grow (docs/data.md).",
        epilog="Exit status: 0 proved, 1 a counterexample, 2 the template cannot be loaded. Scopes: "
        + "; ".join(f"{name}: {text}" for name, text in _SCOPES.items()),
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub name of a model, or a file NAME.jinja")
    parser.add_argument("--tokenizer", metavar="PATH", help="for a file: its tokenizer (default: one made for it)")
    parser.add_argument("--thinking", choices=("on", "off"), default="off", help="enable_thinking (default: off)")
    parser.add_argument("--option", metavar="K=V", action="append", default=[], help="a variable of the template")
    parser.add_argument("--stop", metavar="TOKEN", action="append", default=[], help="a further end token")
    parser.add_argument("--scope", choices=_SCOPES, default="all", help="what has to be proved (default: all)")
    parser.add_argument("--answers", type=int, default=3, metavar="N", help="answers in a dialogue (default: 3)")
    parser.add_argument("--dialogues", type=int, default=200, metavar="N", help="random dialogues (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random dialogues (default: 0)")
    parser.add_argument("--json", action="store_true", help="print facts as JSON")
    return parser.parse_args(words)


def prove_template(words: Sequence[str]) -> int:
    """Print the table and the comparison; returns the exit status. InputError when the template cannot be loaded."""
    request = _parse(words)
    tokenizer = _tokenizer(request)
    scenario = TemplateScenario(
        enable_thinking=request.thinking == "on",
        options=dict(_option(word) for word in request.option),
        stop_token_ids=frozenset(_token(tokenizer, text) for text in request.stop),
    )
    began_s = time.perf_counter()
    bridge = TemplateBridge(tokenizer, scenario)
    load_s = time.perf_counter() - began_s
    rows = bridge.table(max_answers=request.answers, scope=request.scope)
    comparison = compare(bridge, num_dialogues=request.dialogues, seed=request.seed, scope=request.scope)
    holds = bool(rows) and all(row.gap is None for row in rows)
    proved = holds and not (comparison.num_different or _unexpected(rows, comparison))
    facts = _facts(request, bridge, rows, comparison) | {"proved": proved, "load_s": round(load_s, 3)}
    sys.stdout.write(json.dumps(facts) + "\n" if request.json else "\n".join(_lines(request, facts)) + "\n")
    return 0 if proved else 1


def _tokenizer(request: argparse.Namespace) -> Tokenizer:
    path = Path(request.model)
    if path.suffix != ".jinja":
        if request.tokenizer is not None:
            raise ConfigError("--tokenizer needs a template NAME.jinja", code="config.conflict")
        return load_tokenizer(request.model)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the template {path} cannot be read: {error}", code="data.not_found") from error
    if request.tokenizer is None:
        return template_tokenizer(source, special_tokens=tuple(request.stop))
    tokenizer: Any = load_tokenizer(request.tokenizer)
    tokenizer.chat_template = source
    return tokenizer


def _option(word: str) -> tuple[str, Any]:
    name, sign, text = word.partition("=")
    if not name.isidentifier() or not sign:
        raise ConfigError(f"--option {word}: write NAME=VALUE", code="config.bad_override")
    try:
        return name, json.loads(text)
    except ValueError:
        return name, text


def _token(tokenizer: Tokenizer, text: str) -> int:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if len(token_ids) != 1:
        message = f"--stop {text}: the tokenizer has no such token, it needs {len(token_ids)} tokens"
        raise InputError(message, code="data.template_stop")
    return token_ids[0]


def _unexpected(rows: Sequence[Row], comparison: Comparison) -> list[str]:
    proved = {(row.shape, row.following) for row in rows if row.gap is None}
    return [f"{shape} {following}" for shape, following in comparison.gaps if (shape, following) in proved]


def _facts(
    request: argparse.Namespace, bridge: TemplateBridge, rows: Sequence[Row], result: Comparison
) -> dict[str, Any]:
    facts = bridge.facts
    return {
        "template": bridge.template.digest,
        "scope": request.scope if facts.takes_tools or request.scope != "all" else "chat",
        "forms": asdict(facts.forms),
        "stops": list(facts.stops),
        "takes": {"system": facts.takes_system, "tools": facts.takes_tools, "reasoning": facts.takes_reasoning},
        "refusal": facts.refusal,
        "rows": [
            {
                "answer": str(row.shape), "next": row.following, "num_dialogues": row.num_contexts,
                "proved": row.gap is None, "reason": None if row.gap is None else row.gap.reason,
                "counterexample": row.counterexample, "detail": "" if row.gap is None else row.gap.detail,
            }
            for row in rows
        ],
        "random": {
            "seed": request.seed, "num_dialogues": result.num_dialogues, "num_bridges": result.num_bridges,
            "num_different": result.num_different, "num_gaps": sum(result.gaps.values()),
            "unexpected_gaps": _unexpected(rows, result),
            "first_different": None if result.different is None else [*result.different[0], *result.different[1]],
        },
    }  # fmt: skip


def _lines(request: argparse.Namespace, facts: dict[str, Any]) -> list[str]:
    forms, drawn = facts["forms"], facts["random"]
    takes = [name for name, does in facts["takes"].items() if does]
    lines = [
        f"template   {facts['template'][:16]} (thinking {request.thinking}; options {request.option or 'none'})",
        f"takes      {', '.join(takes) or 'questions and answers only'}; arguments as {forms['arguments']}; content as "
        f"{forms['content']}; reasoning {_reasoning(facts)}",
        f"end tokens {' '.join(facts['stops'])}",
        "",
        f"{'answer':<12}{'next':<6}{'dialogues':>9}  result (A answer: r reasoning, c text, t call; T result; U user)",
    ]
    if facts["refusal"]:
        lines.insert(2, f"no tools   {facts['refusal']}")
    for row in facts["rows"]:
        result = "proved" if row["proved"] else f"{row['reason']}: {row['counterexample']}"
        lines.append(f"{row['answer']:<12}{row['next']:<6}{row['num_dialogues']:>9}  {result}")
        if not row["proved"]:
            lines.append(f"{'':<29}{row['detail']}")
    lines += [
        "",
        f"{drawn['num_dialogues']} random dialogues (seed {drawn['seed']}): {drawn['num_bridges']} bridges compared "
        f"with the full rendering, {drawn['num_different']} differ; {drawn['num_gaps']} answers without a bridge",
    ]
    if drawn["unexpected_gaps"]:
        lines.append(f"without a bridge although the table proves them: {', '.join(drawn['unexpected_gaps'])}")
    if drawn["first_different"] is not None:
        lines.append(f"the shortest that differs: {json.dumps(drawn['first_different'], ensure_ascii=False)}")
    return [*lines, f"{'PROVED' if facts['proved'] else 'NOT PROVED'} for scope {facts['scope']}"]


def _reasoning(facts: dict[str, Any]) -> str:
    if not facts["takes"]["reasoning"]:
        return "not shown"
    first, last = facts["forms"]["reasoning_tags"]
    return facts["forms"]["reasoning_key"] or f"in the content between {first} and {last}"
