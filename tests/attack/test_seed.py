"""The numbers that a reported seed repeats."""

import random


def test_random_numbers_depend_on_the_seed_and_the_test_only(rng, request):
    seed = request.config.getoption("hypothesis_seed")
    again = random.Random(f"{0 if seed is None else seed}:{request.node.nodeid}")
    assert [rng.random() for _ in range(3)] == [again.random() for _ in range(3)]


def test_the_folder_is_marked(request):
    assert request.node.get_closest_marker("attack")
