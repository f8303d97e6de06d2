"""What errors suggest: a name that was mistyped, and nothing where none resembles it."""

import pytest

from orchestrrl.core.errors import did_you_mean

KNOWN = ("mode", "journal", "id", "product", "driver", "site", "ocs", "fleet", "weights", "fabric", "options")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("mod", "mode"), ("journl", "journal"), ("idd", "id"), ("produkt", "product"), ("drivr", "driver")],
)
def test_a_name_that_was_mistyped_is_named(typed: str, meant: str) -> None:
    assert did_you_mean(typed, KNOWN) == f"; did you mean {meant}?"


@pytest.mark.parametrize("typed", ["intent", "weird", "nonsense", "", "mode" * 30, 7, None])
def test_a_name_that_resembles_none_suggests_nothing(typed: object) -> None:
    assert did_you_mean(typed, KNOWN) == ""
