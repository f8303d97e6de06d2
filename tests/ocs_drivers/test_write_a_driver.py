"""Check docs/write-a-driver.md: the code it shows is the example's, and its commands run in order.

`pip install -e` would change the environment of the tests, so the package is installed into a separate folder.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "write-a-driver.md").read_text()
EXAMPLE = ROOT / "docs" / "examples" / "line-switch"


def test_page_shows_code_of_example() -> None:
    shown = re.findall(r"^<!-- (\S+) -->\n```\w+\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert [name for name, _ in shown] == [
        "line_switch.py",
        "pyproject.toml",
        "test_line_switch.py",
        "serve_line_switch.py",
    ]
    for name, code in shown:
        assert code.strip() in (EXAMPLE / name).read_text(), name


def test_example_driver_is_short() -> None:
    lines = (EXAMPLE / "line_switch.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) <= 120
