"""Suggestions in errors: the similar name for a mistyped one, and nothing if none is similar."""

import pytest

from orchestrrl.core.errors import did_you_mean

KNOWN = ("mode", "journal", "id", "product", "driver", "site", "ocs", "fleet", "weights", "fabric", "options")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("mod", "mode"), ("journl", "journal"), ("idd", "id"), ("produkt", "product"), ("drivr", "driver")],
)
def test_similar_name_is_suggested(typed: str, meant: str) -> None:
    assert did_you_mean(typed, KNOWN) == f"; did you mean {meant}?"


@pytest.mark.parametrize("typed", ["intent", "weird", "nonsense", "", "mode" * 30, 7, None])
def test_dissimilar_name_has_no_suggestion(typed: object) -> None:
    assert did_you_mean(typed, KNOWN) == ""
