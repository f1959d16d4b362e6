"""The pages that `make docs` generates: options, metrics, alarms and error codes. `python .ci/pages.py FOLDER`."""

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.api.alarm_rules import ALARM_RULES
from areal.api.config.experiment import KINDS, BaseExperimentConfig, GRPOConfig
from areal.api.config.legacy import LEGACY, NODES, SBATCH, SLURM, WITHOUT_OPTION, LoaderOptions
from areal.api.config.load import default_text
from areal.api.config.schema import FieldSpec, fields_of, relevance_of, type_text
from areal.observe.metric_table import METRICS

ROOT = Path(__file__).resolve().parents[1]

_HEAD = """# Configuration options

`areal config SECTION` prints the same facts.

- An option without a default is required. A section that is null by default exists only when the file has it.
- *Relevant when*: under other settings the option has no effect. Such options are listed in one notice when a run
  starts; with `strict_config: true` they are errors. An option that equals its default is never listed. Options of a
  section that is null count as null.
- *Also known as*: names of the option in other systems.
"""


def config_page() -> str:
    """One table for each section class, under the paths where it occurs."""
    lines, places = [_HEAD], _places()
    for cls, paths in places.items():
        if cls in KINDS:
            shared = "" if cls is GRPOConfig else " Options of every kind of training are listed under `GRPOConfig`."
            lines.append(f"## {KINDS[cls][0].upper()}{KINDS[cls][1:]}: `{cls.__name__}`\n\n{_sentence(cls)}{shared}\n")
        else:
            lines.append(f"### {', '.join(f'`{path}`' for path in paths)}\n\n{_sentence(cls)} (`{cls.__name__}`)\n")
        base = fields_of(BaseExperimentConfig) if cls in KINDS and cls is not GRPOConfig else {}
        lines.append("| option | type | default | meaning | relevant when | also known as |\n|---|---|---|---|---|---|")
        lines += [_row(cls, spec, paths[0]) for name, spec in fields_of(cls).items() if name not in base]
        lines.append("")
    return "\n".join([*lines, *_keys_of_areal(places)])


_KEYS = """## Keys of AReaL that are no options here

Files of AReaL v0.5 load unchanged. A key of this table takes the values of the second column; another value is refused.
`MODEL` is `actor`, `critic`, `ref` or another model. `ref` may have the options of an actor too, which a frozen model
does not read.

| key | values | reason |
|---|---|---|"""
_SPEC = """
The first entry of `actor.scheduling_spec` (or `model.scheduling_spec`) and of `rollout.scheduling_spec` sets these
options of `launcher`, where the file does not set them; a notice names an entry that differs from what it sets. ROLE is
`trainer` or `inference_server`. The options without ROLE apply to the whole run: two entries with different values are
an error. The models share the ranks of the trainer, so that entries of `critic`, `ref` and `teacher` have no effect; a
notice names those that differ from the actor's.

| key | option or reason |
|---|---|
| `cpu` | `ROLE_cpus_per_gpu` |
| `mem` (GB) | `ROLE_mem_per_gpu` (MiB) |
| `env_vars` | `ROLE_env_vars` |
| `image` | `slurm.ROLE_image` |"""


def _keys_of_areal(places: Mapping[type[Any], Sequence[str]]) -> Iterator[str]:
    """The table of the keys with rules in `legacy`."""
    yield _KEYS
    rows: dict[tuple[str, str], list[str]] = {}
    loader = fields_of(LoaderOptions)
    for name, rules in LEGACY.items():
        above = {path for cls, paths in places.items() for path in paths if name in (up.__name__ for up in cls.__mro__)}
        where = "MODEL" if name == "TrainEngineConfig" else min(above, key=lambda path: (len(path.split(".")), path))
        where = where.replace("actor.", "MODEL.") if where.startswith("actor.") else where
        for key, rule in rules.items():
            values = {"accept": ", ".join(map(_yaml, rule.values)), "copy": "empty, or equal", "lora": "any"}
            values |= {"loader": loader[key].type_text} if key in loader else {}
            rows.setdefault((values.get(rule.action, "any"), rule.why), []).append(
                f"`{where}.{key}`".replace("`.", "`")
            )
    for (values, why), keys in rows.items():
        yield f"| {', '.join(dict.fromkeys(keys))} | {values} | {why} |"
    yield _SPEC
    yield from (f"| `{name}` | `{name}` |" for name in NODES)
    yield from (f"| `{name}` | `slurm.sbatch_additional_args`: `--{name}` |" for name in SBATCH)
    yield from (f"| `{name}` | `slurm.{name}` |" for name in SLURM)
    yield from (f"| `{name}` | no effect: {why} |" for name, why in WITHOUT_OPTION.items())
    yield ""


def _yaml(value: Any) -> str:
    return f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value}`"


def _places() -> dict[type[Any], list[str]]:
    """Every section class with its dotted paths, in the order of the kinds and their fields."""
    places: dict[type[Any], list[str]] = {}

    def visit(cls: type[Any], path: str) -> None:
        known = places.setdefault(cls, [])
        if path in known:
            return
        known.append(path)
        for name, spec in fields_of(cls).items():
            below = spec.hint if spec.is_section else spec.item_section
            if below is not None:
                visit(below, f"{path}.{name}".lstrip(".") + ("" if spec.is_section else "[]"))

    for kind in KINDS:
        visit(kind, "")
    return places


def _row(cls: type[Any], spec: FieldSpec, path: str) -> str:
    entry = cls.__dataclass_fields__[spec.name]
    condition = relevance_of(entry)
    kind = " \\| ".join(spec.choices) or f"{type_text(spec.hint)} {spec.range_text}".strip()
    cells = [
        f"`{spec.name}`",
        kind + (" or null" if spec.nullable and not spec.is_section else ""),
        default_text(spec).removeprefix("default "),
        spec.sentence.replace("|", "\\|"),
        "" if condition is None else condition.words(path).replace("|", "\\|"),
        entry.metadata.get("also", ""),
    ]
    return f"| {' | '.join(cells)} |"


def _sentence(cls: type[Any]) -> str:
    return (cls.__doc__ or "").split("\n")[0]


_METRICS = """# Metrics

The metrics of every train step are one line of `metrics.jsonl` in the run folder, and go to every tracker in
`stats_logger`. A word in capitals and `N` are parts of a key that differ between runs. A metric is left out
when it does not apply: without a critic there is no `critic/loss`. A custom loss adds `actor/NAME` for each of its
metrics. `null` in `metrics.jsonl` is a value that is not finite.
Means over tokens are over the trained tokens of all ranks. [alarms.md](alarms.md) lists the values that raise an alarm.
"""


def metrics_page() -> str:
    """One table for each section of the metrics."""
    parts = [_METRICS]
    for section, entries in itertools.groupby(METRICS, key=lambda entry: entry.section):
        parts.append(f"\n## {section}\n\n| key | unit | meaning |\n|---|---|---|\n")
        parts += [f"| `{entry.key}` | {entry.unit} | {entry.meaning} |\n" for entry in entries]
    return "".join(parts)


_ALARMS = """# Alarms

After every train step the trainer compares the metrics with the rules below. An alarm is raised when a value was beyond
its limit in the given number of consecutive steps. It is one line in the terminal and in `logs/trainer-0.log`, and one
JSON object in `alarms.jsonl` of the run folder; `summary.json` and the last line of the run name it again. It is raised
once, and again only after the value was within the limit for as many steps. A step without the value changes nothing.

```yaml
alarms:
  action: warn              # of every rule: warn, stop or off
  rules:                    # changes of single rules
    - {name: logprob_k3, action: stop}
    - {name: grad_norm, limit: 500, steps: 10}
    - {name: stale_tokens, action: off}
```

`action: stop` writes a recovery checkpoint (unless `recover.mode=disabled`) and ends the run with the error
`alarm.NAME`. The same command continues the run from that checkpoint; while the value stays beyond the limit, the next
train step ends it again.

The state of the rules follows from `metrics.jsonl`. A trainer that starts again from a recovery checkpoint reads the
steps before it: a streak continues, and no alarm of these steps is raised again. Lines of later steps are removed from
both files, because these steps are trained again; the terminal shows an alarm of the same step once.

| name | value | limit | steps | meaning | likely causes | look at |
|---|---|---|---|---|---|---|
"""


def alarms_page() -> str:
    rows = [
        f"| `{rule.name}` | {rule.value} | {rule.side} {rule.limit:g} | {rule.steps} | {rule.meaning} | {rule.causes} "
        f"| {rule.look_at} |\n"
        for rule in ALARM_RULES
    ]
    return _ALARMS + "".join(rows)


_ERRORS = """# Errors

Programs and tests compare the code of an error (`error.code`), people read the message, which names the option, file or
process with its value, and what to do. Commands print the code in brackets after the message.

| code | raised by |
|---|---|
"""
_CODE = re.compile(r"[a-z]+\.[a-z_]+")


def errors_page() -> str:
    """Every code that is passed as `code=`, is the third part of a problem, or is the code of a class."""
    users: dict[str, set[str]] = {}
    for path in sorted((ROOT / "areal").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.keyword(arg="code", value=value) | ast.Assign(targets=[ast.Name(id="code")], value=value):
                    values = [value]
                case ast.Call(func=ast.Name(id="Problem" | "ConfigProblem"), args=[_, _, value, *_]):
                    values = [value]
                case _:
                    continue
            for part in (part for value in values for part in ast.walk(value)):
                if isinstance(part, ast.Constant) and _CODE.fullmatch(str(part.value)):
                    users.setdefault(str(part.value), set()).add(f"`{path.relative_to(ROOT)}`")
    return _ERRORS + "".join(f"| `{code}` | {', '.join(sorted(users[code]))} |\n" for code in sorted(users))


if __name__ == "__main__":
    for name, page in {
        "config": config_page, "metrics": metrics_page, "alarms": alarms_page, "errors": errors_page,
    }.items():  # fmt: skip
        Path(sys.argv[1], f"{name}.md").write_text(page(), encoding="utf-8")
