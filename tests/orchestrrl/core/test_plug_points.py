"""Implementations are found by name: ours without a look at installed packages, others by their entry points."""

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
    """The groups that were looked for in what is installed."""
    asked: list[str] = []

    def entry_points(group: str) -> list[EntryPoint]:
        asked.append(group)
        return OTHERS

    monkeypatch.setattr(plug_points, "entry_points", entry_points)
    plug_points._registered.cache_clear()
    yield asked
    plug_points._registered.cache_clear()


def test_ours_are_found_without_a_look_at_what_is_installed(looks: list[str]) -> None:
    assert COLOURS.load("red") == pytest.approx(3.14159, abs=1e-5)
    assert not looks


def test_others_are_found_by_their_entry_points_in_one_look(looks: list[str]) -> None:
    assert COLOURS.load("blue") == pytest.approx(6.28319, abs=1e-5)
    assert COLOURS.names() == ("blue", "grey", "red")
    assert "blue" in COLOURS
    assert "pink" not in COLOURS
    assert looks == ["tests.colours"]


def test_an_unknown_name_and_one_that_is_not_installed(looks: list[str]) -> None:
    with pytest.raises(Permanent, match="unknown colour 'pink'; known: blue, grey, red"):
        COLOURS.load("pink")
    with pytest.raises(Permanent, match=r"colour 'grey' has a missing dependency: .*no_such_module"):
        COLOURS.load("grey")
