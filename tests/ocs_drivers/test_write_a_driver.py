"""docs/write-a-driver.md, followed word for word: the code that it shows is the example's, its commands run in order.

`pip install -e` would change the environment that the tests run in: here the package goes into a folder beside it.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-driver.md").read_text()
EXAMPLE = ROOT / "docs" / "examples" / "line-switch"


def test_the_code_shown_is_that_of_the_example() -> None:
    shown = re.findall(r"^<!-- (\S+) -->\n```\w+\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert [name for name, _ in shown] == [
        "line_switch.py",
        "pyproject.toml",
        "test_line_switch.py",
        "serve_line_switch.py",
    ]
    for name, code in shown:
        assert code.strip() in (EXAMPLE / name).read_text(), name


def test_the_driver_is_short() -> None:
    lines = (EXAMPLE / "line_switch.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 120
