"""reasoning-gym in a worker: items made from (name, config, seed, index), and scores of answers."""

import difflib
import importlib
import itertools
import json

INSTALL = "pip install reasoning-gym==0.1.25"
_FORMAT = "\n\nWrite the final answer, and nothing else, between <answer> and </answer>."
_DATASETS = 64  # Datasets that are kept; an item is generated in microseconds, a dataset may take longer.


class NoSuchDataset(Exception):
    code = "env.not_found"


class Adapter:
    """`args`: `extract` false = the whole answer is scored; `instruction` = what is added to a question."""

    def __init__(self, env, args):
        self._gym = importlib.import_module("reasoning_gym")
        self._factory = importlib.import_module("reasoning_gym.factory")
        self._env = env
        self._extracts = args.get("extract", True)
        self._instruction = args.get("instruction", _FORMAT if self._extracts else "")
        self._datasets = {}

    def episode(self):
        return Episode(self)

    def name_of(self, row):
        name = row.get("env") or self._env
        if name not in self._factory.DATASETS:
            near = difflib.get_close_matches(str(name), self._factory.DATASETS)
            raise NoSuchDataset(f"reasoning-gym has no dataset {name!r}; near it: {', '.join(near) or 'none'}")
        return name

    def max_level(self, row):
        """The highest level of the curriculum of a dataset up to which it accepts all; None = there is none."""
        name = self.name_of(row)
        if not self._factory.has_curriculum(name):
            return None
        attributes = self._factory.create_curriculum(name).attributes
        top = max((len(attribute.levels) for attribute in attributes.values()), default=1) - 1
        accepted = itertools.takewhile(lambda level: self._accepts(row, level), range(top + 1))
        return max(accepted, default=None)

    def _accepts(self, row, level):
        """Whether the dataset takes a level: some refuse values of their own curriculum. An item may take minutes."""
        try:
            self._dataset(self.name_of(row), {"size": 1, "seed": row["seed"], **(row.get("config") or {})}, level)
        except Exception:  # noqa: BLE001 - of the package
            return False
        return True

    def item(self, row):
        """The dataset and the item of a row. With `level`, the curriculum of the dataset changes its config."""
        name, config = self.name_of(row), row.get("config") or {}
        size = max(row.get("size", 0), row["index"] + 1)  # some datasets make all items at once
        key = json.dumps([name, config, size, row["seed"], row.get("level")], sort_keys=True)
        if key not in self._datasets:
            if len(self._datasets) >= _DATASETS:
                del self._datasets[next(iter(self._datasets))]
            self._datasets[key] = self._dataset(name, {"size": size, "seed": row["seed"], **config}, row.get("level"))
        dataset = self._datasets[key]
        return dataset, dataset[row["index"]]

    def _dataset(self, name, config, level):
        if level is None:
            return self._gym.create_dataset(name, **config)
        curriculum = self._factory.create_curriculum(name)
        curriculum.set_global_level(level)
        made = curriculum.generate_configuration(config)
        return self._factory.DATASETS[name][0](config=made)

    def extracted(self, text):
        if not self._extracts:
            return text
        return self._gym.utils.extract_answer(text)

    def question(self, row):
        return self.item(row)[1]["question"] + self._instruction

    def reference(self, row):
        """The answer of a row as text; None = it has none."""
        return self.item(row)[1]["answer"]

    def score(self, row, answer, through_json=False):
        """The score of the package for an answer that is already extracted; `through_json`: of the item as JSON keeps
        it."""
        dataset, item = self.item(row)
        return float(dataset.score_answer(answer, json.loads(json.dumps(item, default=str)) if through_json else item))


class Episode:
    """One question and one answer."""

    def __init__(self, adapter):
        self._adapter = adapter

    def reset(self, row):
        self._row = row
        return {"messages": [{"role": "user", "content": self._adapter.question(row)}]}

    def step(self, message, is_cut):
        answer, parts = self._adapter.extracted(message["content"] or ""), {}
        # Some datasets score text without an answer above 0: what is not there earns nothing.
        reward = 0.0 if answer is None else self._scored(answer, parts)
        parts["extracted"] = float(answer is not None)
        return {"messages": [], "reward": reward, "done": True, "parts": parts}

    def _scored(self, answer, parts):
        """Some datasets raise for a word instead of a number. That is a wrong answer, unless they also raise for the
        right one."""
        try:
            return self._adapter.score(self._row, answer)
        except Exception:  # noqa: BLE001 - of the package
            self._adapter.score(self._row, self._adapter.reference(self._row))
            parts["score_raised"] = 1.0
            return 0.0
