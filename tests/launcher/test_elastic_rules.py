import pytest

from areal.api.config import ElasticConfig
from areal.launcher.supervisor import ElasticRule, ServerLoad, server_load

CONFIG = ElasticConfig(min=2, max=4, add_above=10.0, busy_s=5.0, remove_below=4.0, idle_s=20.0)


def changes(loads, config=CONFIG):
    """The changes, with their seconds, of one load a second: (servers, requests), or None."""
    rule = ElasticRule(config)
    decided = [rule.decide(None if load is None else ServerLoad(*load), float(s)) for s, load in enumerate(loads)]
    return [(second, change) for second, change in enumerate(decided) if change]


@pytest.mark.parametrize(
    ("servers", "requests", "expected"),
    [
        (2, 21, [(5, "add"), (11, "add"), (17, "add"), (23, "add"), (29, "add")]),
        (2, 20, []),
        (4, 400, []),  # at the maximum
        (3, 12, []),  # on the lower bound
        (3, 11, [(20, "remove")]),
        (2, 0, []),  # at the minimum
        (1, 0, [(5, "add"), (11, "add"), (17, "add"), (23, "add"), (29, "add")]),  # below the minimum
        (5, 500, [(20, "remove")]),  # above the maximum
    ],
)
def test_a_constant_load_for_half_a_minute(servers, requests, expected):
    assert changes([(servers, requests)] * 30) == expected


def test_a_reading_between_the_bounds_restarts_the_time():
    assert changes([(2, 30)] * 5 + [(2, 15)] + [(2, 30)] * 5) == []
    assert changes([(3, 0)] * 20 + [(3, 15)] + [(3, 0)] * 20) == []
    assert changes([(3, 0)] * 19 + [(3, 60)] * 6) == [(24, "add")]


def test_an_unknown_load_changes_nothing_and_keeps_the_time():
    assert changes([(2, 30), *[None] * 5, (2, 30)]) == [(6, "add")]
    assert changes([None] * 100) == []


def test_without_a_maximum_nothing_changes():
    assert changes([(1, 1000)] * 1000, ElasticConfig()) == []


def test_a_change_does_not_cause_the_opposite_one():
    """Constant demand: the number of servers moves into the band and stays there."""
    for demand in range(100):
        rule, servers, history = ElasticRule(CONFIG), 2, []
        for second in range(300):
            change = rule.decide(ServerLoad(servers, demand), float(second))
            servers += {"add": 1, "remove": -1, "": 0}[change]
            history.append(servers)
        assert history == sorted(history), demand
        assert history[-1] == history[-100]


def test_load_of_a_status():
    replicas = {"replicas": [{"running": 3}, {"running": 4}]}
    assert server_load(2, {"replicas": replicas, "updating_to": None}) == ServerLoad(2, 7)
    assert server_load(2, {"replicas": replicas, "updating_to": 5}) is None
    assert server_load(2, {}) == ServerLoad(2, 0)
    assert server_load(2, None) is None
