"""What every name registry does: the same tests run over files and over etcd."""

import threading

import pytest

from areal.api.errors import LaunchError
from areal.system.discovery import NameRegistry
from tests.expect import raises_code


class RegistryCases:
    """Base of the test classes; each gives its fixture `open_registry`, which opens another view of the same names."""

    @pytest.fixture
    def registry(self, open_registry) -> NameRegistry:
        return open_registry()

    def test_add_get_list_remove_clear(self, registry):
        assert registry.get("servers/0") is None
        assert registry.list("servers") == {}
        registry.add("servers/1", "1")
        registry.add("servers/0", "0")
        registry.add("serversx", "2")
        registry.add("ready/trainer-0", "3")
        assert list(registry.list("servers").items()) == [("servers/0", "0"), ("servers/1", "1")]
        assert registry.list("servers/") == registry.list("servers")
        assert len(registry.list("")) == 4
        registry.remove("servers/0")
        registry.remove("servers/0")
        assert registry.get("servers/0") is None
        registry.clear()
        assert registry.list("") == {}

    def test_a_taken_name_is_refused_unless_replaced(self, registry, open_registry):
        registry.add("controller", "first")
        for other in (registry, open_registry()):
            with raises_code("process.name_taken", "controller", "first"):
                other.add("controller", "second")
        assert registry.get("controller") == "first"
        open_registry().add("controller", "second", replace=True)
        assert open_registry().get("controller") == "second"

    def test_one_of_many_adds_of_a_name_succeeds(self, open_registry):
        registries = [open_registry() for _ in range(8)]
        outcomes: list[str] = []
        together = threading.Barrier(len(registries))

        def add(index: int) -> None:
            together.wait()
            try:
                registries[index].add("controller", str(index))
                outcomes.append(str(index))
            except LaunchError as error:
                outcomes.append(error.code)

        threads = [threading.Thread(target=add, args=(index,)) for index in range(len(registries))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = [outcome for outcome in outcomes if outcome.isdigit()]
        assert winners == [open_registry().get("controller")]
        assert outcomes.count("process.name_taken") == len(registries) - 1

    @pytest.mark.parametrize("name", ["", "../x", "a//b", "/a", ".hidden", "a b"])
    def test_a_name_outside_the_grammar_is_refused(self, registry, name):
        for call in (lambda: registry.add(name, "x"), lambda: registry.get(name), lambda: registry.remove(name)):
            with raises_code("process.bad_name", repr(name)):
                call()

    def test_wait_returns_a_name_that_comes_later(self, registry, open_registry):
        other = open_registry()
        timer = threading.Timer(0.1, other.add, ("controller", "here"))
        timer.start()
        assert registry.wait("controller", 200) == "here"
        timer.join()
        assert registry.wait("controller", 0) == "here"

    @pytest.mark.parametrize("timeout_s", [0.0, 0.1])
    def test_wait_ends_with_the_name_and_the_limit(self, registry, timeout_s):
        with raises_code("process.not_registered", "ready/server-0", f"{timeout_s:g} s"):
            registry.wait("ready/server-0", timeout_s)

    def test_own_changes_are_visible_at_once(self, registry, open_registry):
        """A supervisor removes a ready sign and must not read the removed one."""
        other = open_registry()
        for round_ in range(50):
            other.add("ready/server-0", str(round_), replace=True)
            registry.remove("ready/server-0")
            assert registry.get("ready/server-0") is None
            registry.add("ready/server-0", "own", replace=True)
            assert registry.get("ready/server-0") == "own"

    def test_changes_of_others_become_visible(self, registry, open_registry, until):
        other = open_registry()
        assert registry.list("servers") == {}
        other.add("servers/0", "a")
        until(lambda: registry.list("servers") == {"servers/0": "a"})
        other.add("servers/0", "b", replace=True)
        until(lambda: registry.get("servers/0") == "b")
        other.remove("servers/0")
        until(lambda: registry.get("servers/0") is None)
        other.add("servers/1", "c")
        other.clear()
        until(lambda: registry.list("") == {})

    def test_readers_see_only_complete_values(self, registry, open_registry):
        long, other = "x" * 100_000, open_registry()
        registry.add("a", long)
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                other.add("a", long, replace=True)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert {len(registry.get("a") or "") for _ in range(200)} == {100_000}
        finally:
            stop.set()
            writer.join()

    def test_closing_twice_is_allowed_and_keeps_the_names(self, registry, open_registry):
        registry.add("a", "1")
        registry.close()
        registry.close()
        assert open_registry().get("a") == "1"
