"""What the README and docs/ name exists. tests/system/test_docs_processes.py runs their commands."""

import re
from pathlib import Path

from orchestrrl.core.config.example import EXAMPLE
from orchestrrl.daemon.configuration import load_config

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def test_every_path_that_a_page_names_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_test_that_a_page_names_exists() -> None:
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"`(test_\w+\.py)`", text))
        assert named <= files, f"{page.name}: {sorted(named - files)}"
        assert [path for path in re.findall(r"\btests/\w[\w/]*\.py", text) if not (ROOT / path).exists()] == []


def test_the_shipped_example_is_the_one_that_the_command_prints() -> None:
    path = ROOT / "deploy" / "orchestrrl.example.yaml"
    assert path.read_text() == EXAMPLE
    load_config(path)
