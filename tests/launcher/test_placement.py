"""Where the processes of a run are placed."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.api.config import LauncherConfig
from areal.api.errors import ConfigError
from areal.launcher import placement
from areal.launcher.placement import Demand, Machine, Place, place_again
from areal.system.network import Host
from tests.expect import raises_code

NONE = Demand(count=0, gpus=0)


def place(machines, servers, trainers, gpu_limit=8):
    return placement.place(machines, servers, trainers, gpu_limit=gpu_limit)


def machines(*sizes, cores=8):
    return [
        Machine(cores=cores, gpus=tuple(map(str, range(size))), host=Host(node=f"node{index}"))
        for index, size in enumerate(sizes, 1)
    ]


def shown(places):
    return [(item.machine.host.node, ",".join(item.gpus)) for item in places]


def test_a_server_stays_on_one_machine_and_trainers_take_whole_machines_first():
    placed = place(machines(8, 8, 8), Demand(count=3, gpus=4), Demand(count=8, gpus=1))
    assert [shown(members) for members in placed.servers] == [
        [("node1", "0,1,2,3")],
        [("node1", "4,5,6,7")],
        [("node2", "0,1,2,3")],
    ]
    assert shown(placed.trainers) == [("node3", str(gpu)) for gpu in range(8)]
    assert [(machine.host.node, gpus) for machine, gpus in placed.spare_gpus] == [("node2", ("4", "5", "6", "7"))]


def test_trainers_use_what_servers_leave_once_no_whole_machine_is_free():
    placed = place(machines(4, 4), Demand(count=1, gpus=2), Demand(count=6, gpus=1))
    assert shown(placed.trainers) == [("node2", g) for g in "0123"] + [("node1", g) for g in "23"]


def test_a_server_that_needs_more_than_a_machine_takes_whole_machines():
    placed = place(machines(8, 8, 8), Demand(count=1, gpus=16), Demand(count=4, gpus=1))
    assert [len(server.gpus) for server in placed.servers[0]] == [8, 8]
    assert [server.machine.host.node for server in placed.servers[0]] == ["node1", "node2"]


@pytest.mark.parametrize(
    ("sizes", "servers", "trainers"),
    [
        ((8,), Demand(count=2, gpus=4), Demand(count=1, gpus=1)),
        ((3, 3), Demand(count=1, gpus=4), NONE),
        ((8, 8), Demand(count=1, gpus=12), NONE),
        ((0, 0), Demand(count=1, gpus=1), NONE),
    ],
)
def test_what_does_not_fit_is_refused(sizes, servers, trainers):
    with raises_code("launch.too_few_gpus"):
        place(machines(*sizes), servers, trainers)


def test_gpus_beyond_the_limit_are_not_used():
    placed = place(machines(8, 8), Demand(count=2, gpus=2), Demand(count=2, gpus=1), gpu_limit=3)
    assert [shown(members) for members in placed.servers] == [[("node1", "0,1")], [("node2", "0,1")]]
    assert shown(placed.trainers) == [("node1", "2"), ("node2", "2")]
    assert placed.spare_gpus == ()


def test_processes_on_the_cpu_are_divided_by_cores():
    large, small = machines(0, cores=12)[0], machines(0, 0, cores=4)[1]
    placed = place([large, small], Demand(count=4, gpus=0), NONE)
    assert [members[0].machine.host.node for members in placed.servers].count("node1") == 3


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), st.integers(0, 4), st.integers(1, 8), st.integers(0, 12))
def test_no_gpu_is_used_twice_and_ranks_of_a_machine_follow_each_other(sizes, num_servers, size, num_trainers):
    try:
        placed = place(machines(*sizes), Demand(count=num_servers, gpus=size), Demand(count=num_trainers, gpus=1))
    except ConfigError:
        return
    used = [(p.machine.host.node, gpu) for ps in (*placed.servers, placed.trainers) for p in ps for gpu in p.gpus]
    spare = [(machine.host.node, gpu) for machine, gpus in placed.spare_gpus for gpu in gpus]
    assert len(used) == len(set(used)) == num_servers * size + num_trainers
    assert sorted(used + spare) == [(f"node{i}", str(gpu)) for i, count in enumerate(sizes, 1) for gpu in range(count)]
    nodes = [trainer.machine.host.node for trainer in placed.trainers]
    assert len([1 for a, b in itertools.pairwise(nodes) if a != b]) == max(0, len(set(nodes)) - 1)


def again(wanted, alive, in_use, gpu_limit=8):
    actual = place_again(wanted, alive, in_use, gpu_limit=gpu_limit)
    return None if actual is None else (actual.machine.host.node, ",".join(actual.gpus))


def test_a_process_starts_again_where_it_was_if_that_machine_is_alive():
    first, second = machines(4, 4)
    assert again(Place(machine=second, gpus=("1",)), [first, second], [Place(machine=second, gpus=("0",))]) == (
        "node2",
        "1",
    )
    assert again(Place(machine=second), [first, second], [Place(machine=second)]) == ("node2", "")


def test_a_process_of_a_lost_machine_takes_free_gpus_of_another_one():
    first, second, third = machines(2, 4, 4)
    wanted = Place(machine=third, gpus=("0", "1"))
    taken = [Place(machine=first, gpus=("0",)), Place(machine=second, gpus=("1",))]
    assert again(wanted, [first, second], taken) == ("node2", "0,2")
    assert again(wanted, [first, second], taken, gpu_limit=2) is None
    assert again(wanted, [], []) is None


def test_gpus_that_another_process_took_meanwhile_are_not_used_twice():
    first, second = machines(2, 2)
    wanted = Place(machine=first, gpus=("0",))
    assert again(wanted, [first, second], [Place(machine=first, gpus=("0",))]) == ("node1", "1")


def test_a_process_on_the_cpu_moves_to_the_machine_with_the_fewest_processes():
    first, second, third = machines(0, 0, 0)
    assert again(Place(machine=third), [first, second], [Place(machine=first)]) == ("node2", "")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", {""}), ("a, b", {"a", "b"}), ("n[1-3,07]", {"n1", "n2", "n3", "n07"}),
        ("n[08-10]x", {"n08x", "n09x", "n10x"}),
        ("a,r[1-2]n[3,5],10.0.0.4", {"a", "r1n3", "r1n5", "r2n3", "r2n5", "10.0.0.4"}),
    ],
)  # fmt: skip
def test_a_list_of_nodes_is_written_as_in_slurm(text, names):
    assert placement.node_names(text) == names - {""}


def test_only_chosen_nodes_are_used():
    names = ["node1", "10.0.0.1"]
    assert placement.is_chosen(names, "", "")
    assert placement.is_chosen(names, "10.0.0.[1-4]", "node2")
    assert not placement.is_chosen(names, "node2", "")
    assert not placement.is_chosen(names, "node[1-2]", "10.0.0.1")


def test_a_machine_with_less_memory_than_its_processes_want_has_a_warning():
    options = LauncherConfig(inference_server_mem_per_gpu=1024, trainer_mem_per_gpu=2048)
    wanted = placement.memory_demand("server", 2, options) + placement.memory_demand("trainer", 1, options)
    assert wanted == 4 * 2**30
    machines = [Machine(cores=9, memory_bytes=size * 2**30, host=Host(node=f"n{size}")) for size in (3, 4)]
    [text] = placement.shortages(machines, Counter(), Counter({machine.host: wanted for machine in machines}))
    assert all(word in text for word in ("n3", "4 GiB", "3 GiB"))
