"""Tables as printed on a terminal."""

import pytest

from orchestrrl.cli.output import cells_table, print_view

TITLE = "virtual: 1 passed, 0 failed, 0 skipped"


def test_title_wider_than_its_table_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    print_view(cells_table(TITLE, ("test", "took"), [("plan", "3 ms")]))
    assert TITLE in capsys.readouterr().out.splitlines()
