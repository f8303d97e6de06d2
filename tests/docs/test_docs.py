"""Paths and tests named in the README and docs/ exist. tests/system/test_docs_processes.py runs their commands."""

import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config as mkdocs_config

from orchestrrl.core.config.example import EXAMPLE
from orchestrrl.daemon.configuration import load_config
from tests.docs import reference_pages

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FOLDERS = r"(?:balancer|deploy|docs|ocs_drivers|orchestrrl|planner|proto|tests)"


def test_every_path_that_a_page_names_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_paths_in_code_spans_exist() -> None:
    for page in PAGES:
        for path in re.findall(rf"`({FOLDERS}/[\w./-]+)`", page.read_text()):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.parametrize("name", sorted({*reference_pages.PAGES} - {"grpc.md"}))  # that one starts a process
def test_reference_pages_match_the_code(name: str) -> None:
    path = reference_pages.FOLDER / name
    assert path.read_text() == reference_pages.page(name), "run: python tests/docs/reference_pages.py"


def test_site_builds_without_broken_links(tmp_path: Path) -> None:
    build(mkdocs_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(tmp_path / "site")))
    assert (tmp_path / "site" / "quick-start" / "index.html").exists()


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) < 1200


def test_every_test_that_a_page_names_exists() -> None:
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for page in PAGES:
        text = page.read_text()
        named = set(re.findall(r"`(test_\w+\.py)`", text))
        assert named <= files, f"{page.name}: {sorted(named - files)}"
        assert [path for path in re.findall(r"\btests/\w[\w/]*\.py", text) if not (ROOT / path).exists()] == []


def test_shipped_example_equals_the_printed_one() -> None:
    path = ROOT / "deploy" / "orchestrrl.example.yaml"
    assert path.read_text() == EXAMPLE
    load_config(path)
