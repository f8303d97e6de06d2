"""The command lines in deploy/ have options that the commands accept."""

import re
import shlex
from pathlib import Path

import pytest

from orchestrrl.cli.commands import MODULE_OF
from orchestrrl.cli.main import load

SYSTEMD = Path(__file__).parents[3] / "deploy" / "systemd"
# Examples of the values with which systemd replaces %i and the variables of an environment file.
INSTANCE = "e0"


def command_line(unit: Path) -> list[str]:
    """Return the arguments of the unit's ExecStart, with its variables replaced by the examples in its comments."""
    text = unit.read_text()
    values = dict(re.findall(r"^#.*?\b([A-Z]+)=(.*)$", text, flags=re.MULTILINE))
    (line,) = re.findall(r"^ExecStart=/opt/orchestrrl/bin/orchestrrl (.*)$", text, flags=re.MULTILINE)
    line = re.sub(r"\$\{?([A-Z]+)\}?", lambda found: values[found[1]], line)
    return shlex.split(line.replace("%i", INSTANCE))


@pytest.mark.parametrize("unit", sorted(SYSTEMD.iterdir()), ids=lambda unit: unit.name)
def test_systemd_unit_starts_a_command_with_options_that_it_has(unit: Path) -> None:
    words = command_line(unit)
    path = next(path for path in (" ".join(words[:2]), words[0]) if path in MODULE_OF)
    arguments = words[len(path.split()) :]
    with load(path).make_context(path, arguments) as context:
        assert not context.args
