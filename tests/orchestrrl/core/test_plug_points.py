"""Look up implementations by name: built-in ones without reading installed packages, others by entry points."""

from collections.abc import Iterator
from importlib.metadata import EntryPoint

import pytest

from orchestrrl.core import plug_points
from orchestrrl.core.errors import Permanent
from orchestrrl.core.plug_points import PlugPoint

COLOURS = PlugPoint("colour", "tests.colours", {"red": "math:pi", "grey": "no_such_module:x"})
OTHERS = [EntryPoint("blue", "math:tau", "tests.colours"), EntryPoint("red", "math:e", "tests.colours")]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the groups that are searched in installed packages."""
    asked: list[str] = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return OTHERS

    monkeypatch.setattr(plug_points, "entry_points", entry_points)
    plug_points._registered.cache_clear()
    yield asked
    plug_points._registered.cache_clear()


def test_built_in_names_are_found_without_reading_packages(looks: list[str]) -> None:
    assert COLOURS.load("red") == pytest.approx(3.14159, abs=1e-5)
    assert not looks


def test_other_names_are_found_by_entry_point_in_one_search(looks: list[str]) -> None:
    assert COLOURS.load("blue") == pytest.approx(6.28319, abs=1e-5)
    assert COLOURS.names() == ("blue", "grey", "red")
    assert "blue" in COLOURS
    assert "pink" not in COLOURS
    assert looks == ["tests.colours"]


def test_unknown_name_and_missing_dependency_raise(looks: list[str]) -> None:
    with pytest.raises(Permanent, match="unknown colour 'pink': must be one of blue, grey, red"):
        COLOURS.load("pink")
    with pytest.raises(
        Permanent, match=r"cannot load colour 'grey', because a dependency is missing: .*no_such_module"
    ):
        COLOURS.load("grey")
