"""One answer of a run as facts for JSON, and as lines for people."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal.data.tokenizer import Tokenizer
from areal.ledger.samples import EpisodeRecord, Sample

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REPEATED = re.compile(r"(<[^<>\s]+>)\1+")
"""The placeholders of an image."""
_COLORS = ((-0.1, 32), (-0.7, 36), (-2.3, 33), (-math.inf, 31))
"""Lowest log-probability and terminal colour: probabilities above 0.9, 0.5, 0.1, and the rest."""
_VERSION = "; <vN> = from here policy version N"
_LEGEND = f"log-probability: green > -0.1, cyan > -0.7, yellow > -2.3, red below; grey = not in the loss{_VERSION}"
_PLAIN_LEGEND = f"a token in the loss is followed by {{log-probability}}{_VERSION}"
MAX_COLUMN = 500
"""Maximum characters of a dataset column in text; JSON has all."""


def facts_of(
    record: EpisodeRecord, sample: Sample | None, tokenizer: Tokenizer | None, *, tokens: bool
) -> dict[str, Any]:
    """What is known of an answer, JSON-ready. `sample` None: its tokens are not recorded."""
    facts: dict[str, Any] = {
        "episode": record.episode,
        "state": record.state,
        "reason": record.reason,
        "step": record.step,
        "row": record.row,
        "epoch": record.epoch,
        "stats": record.stats,
    }
    if sample is None:
        return facts
    made = [version for version in sample.versions if version >= 0]
    spans = [
        {"generated": generated, "text": _text(sample.token_ids[first:end], tokenizer)}
        | ({"turn": sample.turns[first]} if sample.turns and sample.turns[first] >= 0 else {})
        for generated, first, end in sample.spans()
    ]
    answers = [ids for generated, *edges in sample.spans() if generated for ids in [sample.token_ids[slice(*edges)]]]
    facts |= {
        "trajectory": sample.number,
        "reward": None if math.isnan(sample.reward) else sample.reward,
        "reward_parts": sample.parts,
        "versions": [min(made), max(made)] if made else None,
        "stop_reason": "stop" if sample.finished else "length",
        "num_tokens": len(sample.token_ids),
        "num_generated": len(made),
        "num_in_loss": sum(sample.in_loss),
        "prompt": "" if spans[0]["generated"] else spans[0]["text"],
        "answer": _text(answers[-1], tokenizer, plain=True) if answers else "",
        "spans": spans,
        "images": [{"sha256": image.sha256, "grid": image.grid} for image in sample.images],
    }
    if sample.session is not None:
        facts["session"] = _session(sample.session)
        facts["without_reward"] = [_session(one) for one in sample.without_reward]
    if tokens:
        columns = zip(sample.token_ids, sample.in_loss, sample.logprobs, sample.versions, strict=True)
        facts["tokens"] = [
            {
                "id": token,
                "text": _text([token], tokenizer),
                "in_loss": bool(mask),
                "logprob": logprob,
                "version": version,
            }
            for token, mask, logprob, version in columns
        ]
    return facts


def _session(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What is known of the session of an agent: each tool call with its result, where the dialogue has one."""
    results = {one["tool_call_id"]: one.get("content") for one in recorded["messages"] if one.get("role") == "tool"}
    turns = [
        {
            "reward": turn["reward"],
            "calls": [{**one["function"], "result": results.get(one["id"])} for one in turn["calls"]],
        }
        for turn in recorded["turns"]
    ]
    return {name: value for name, value in recorded.items() if name != "messages"} | {"turns": turns}


def _text(token_ids: Sequence[int], tokenizer: Tokenizer | None, *, plain: bool = False) -> str:
    """`plain`: without special tokens, as a reward function receives it."""
    if tokenizer is None:
        return " ".join(map(str, token_ids))
    return tokenizer.decode(list(token_ids), skip_special_tokens=plain)


def sample_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The facts of an answer for people."""
    where = f", step {facts['step']}" if facts["step"] is not None else ""
    row = f", row {facts['row']} of epoch {facts['epoch']}" if facts["row"] is not None else ""
    reason = f" ({facts['reason']})" if facts["reason"] else ""
    number = f", answer {facts['trajectory']}" if "trajectory" in facts else ""
    yield _paint(f"== episode {facts['episode']}{number}: {facts['state']}{reason}{where}{row}", 1)
    for name, value in facts.get("columns", {}).items():
        yield f"   {name}: {safe(str(value))[:MAX_COLUMN]}"
    if not number:
        yield "   its tokens are not recorded (rollout.keep_rejected keeps those of the newest rejected episodes)"
        yield ""
        return
    yield f"   {_scored(facts)}"
    for image in facts["images"]:
        time, height, width = image["grid"]
        yield f"   image {image.get('file', image['sha256'])} ({time} x {height} x {width} patches)"
    if session := facts.get("session"):
        yield f"   {safe(_session_text(session))}"
    if "tokens" in facts:
        yield from _token_lines(facts["tokens"])
    else:
        for place, span in enumerate(facts["spans"]):
            title = _turn_title(facts, span) if span["generated"] else "inserted" if place else "prompt"
            yield _paint(f"-- {safe(title)}", 2)
            yield safe(_REPEATED.sub(_counted, span["text"]) if facts["images"] else span["text"])
    for other in facts.get("without_reward", ()):
        yield f"   without a reward: {safe(_session_text(other))}"
    yield ""


def _counted(found: re.Match[str]) -> str:
    return f"{found[1]} x {len(found[0]) // len(found[1])}"


def _session_text(session: Mapping[str, Any]) -> str:
    """How the session of an agent went."""
    num_calls = sum(len(turn["calls"]) for turn in session["turns"])
    counts = {
        "malformed tool calls": session["malformed_calls"],
        "retries": session["retries"],
        "forks": session["forks"],
        "drifts": session["drifts"],
        **{f"refused as {code}": count for code, count in session["refused"].items()},
    }
    found = [f"turns {len(session['turns'])}", f"tool calls {num_calls}"]
    found += [f"{name} {count}" for name, count in counts.items() if count]
    why = f"; {session['status']}: {session['message']}" if session["message"] else ""
    return f"session {session['session']}: {', '.join(found)}{why}"


def _turn_title(facts: Mapping[str, Any], span: Mapping[str, Any]) -> str:
    """The heading of generated tokens. Of an agent: the number of the turn, its reward, its tool calls and results."""
    if "turn" not in span or "session" not in facts:
        return "answer"
    turn = facts["session"]["turns"][span["turn"]]
    reward = "" if turn["reward"] is None else f", reward {turn['reward']:g}"
    calls = "; ".join(f"{one['name']}({one['arguments']}) = {one['result']}"[:MAX_COLUMN] for one in turn["calls"])
    return f"turn {span['turn']}{reward}" + (f": {calls}" if calls else "")


def _scored(facts: dict[str, Any]) -> str:
    reward = "not scored" if facts["reward"] is None else f"reward {facts['reward']:g}"
    if parts := facts["reward_parts"]:
        reward += f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})"
    low, high = facts["versions"] or (None, None)
    versions = "no version" if low is None else f"version {low}" if low == high else f"versions {low} to {high}"
    return f"{reward}; {facts['num_generated']} generated tokens by {versions}; ended by {facts['stop_reason']}"


def _token_lines(tokens: Sequence[dict[str, Any]]) -> Iterator[str]:
    """All tokens in one text, with their log-probabilities and versions."""
    in_color = _uses_color()
    version, parts = -1, list[str]()
    for token in tokens:
        if token["version"] >= 0 and token["version"] != version:
            version = token["version"]
            parts.append(_paint(f"<v{version}>", 35))
        text = safe(token["text"])
        if not token["in_loss"]:
            parts.append(_paint(text, 90))
        elif in_color:
            parts.append(_paint(text, next(color for low, color in _COLORS if token["logprob"] >= low)))
        else:
            parts.append(f"{text}{{{token['logprob']:.2f}}}")
    yield "".join(parts)
    yield _paint(_LEGEND if in_color else _PLAIN_LEGEND, 2)


def _uses_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _paint(text: str, code: int) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if text and _uses_color() else text


def safe(text: str) -> str:
    """Text of a model without characters that control a terminal."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)
