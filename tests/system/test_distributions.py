"""The wheels contain each production file once, and the client changes no version in vLLM's environment."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest

from orchestrrl import __version__
from orchestrrl.cli.extras import PACKAGES
from orchestrrl.lab.testbed.processes import VLLM_PYTHON
from tests.distributions import CLIENT_MODULES, CODE, FOLDERS, ROOT, build

needs_vllm = pytest.mark.skipif(not VLLM_PYTHON.exists(), reason=f"{VLLM_PYTHON} is missing: run `make venv-vllm`")
OF_MAIN = ("balancer", "httptools", "prometheus_client", "psutil", "rich", "typer")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def wheels(dist: Path) -> tuple[zipfile.ZipFile, zipfile.ZipFile]:
    main, client = sorted(dist.glob("*.whl"))
    return zipfile.ZipFile(main), zipfile.ZipFile(client)


@pytest.fixture(scope="module")
def unpacked(wheels: tuple[zipfile.ZipFile, zipfile.ZipFile], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the client's files."""
    folder = tmp_path_factory.mktemp("client")
    wheels[1].extractall(folder)
    return folder


def files_in(*folders: str) -> list[str]:
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts)


def project(folder: str) -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"])


def test_each_file_is_in_one_wheel(wheels: tuple[zipfile.ZipFile, zipfile.ZipFile]) -> None:
    packaged = [name for wheel in wheels for name in wheel.namelist() if name.split("/")[0] in CODE]
    assert sorted(packaged) == files_in(*CODE)


def test_main_wheel_has_protocol_and_deployment_files(wheels: tuple[zipfile.ZipFile, zipfile.ZipFile]) -> None:
    share = f"orchestrrl-{__version__}.data/data/share/orchestrrl/"
    shipped = sorted(name.removeprefix(share) for name in wheels[0].namelist() if name.startswith(share))
    assert shipped == [name for name in files_in("deploy", "proto") if not name.startswith("deploy/client/")]


def test_metadata_has_version_extras_and_plugin(wheels: tuple[zipfile.ZipFile, zipfile.ZipFile]) -> None:
    assert [project(folder)["version"] for folder in FOLDERS] == [__version__, __version__]
    name = f"orchestrrl-{__version__}.dist-info/METADATA"
    metadata = message_from_bytes(wheels[0].read(name))
    assert f"orchestrrl-client=={__version__}" in metadata.get_all("Requires-Dist", [])
    assert set(metadata.get_all("Provides-Extra", [])) >= {*PACKAGES, "ocs", "all"}
    entries = wheels[1].read(f"orchestrrl_client-{__version__}.dist-info/entry_points.txt").decode()
    assert "[vllm.general_plugins]\norchestrrl = orchestrrl_vllm:register\n" in entries


def test_extra_all_has_every_extra() -> None:
    declared = project(".")["optional-dependencies"]
    names = {"all"}
    while added := {name for each in names for part in declared[each] for name in own_extras(part)} - names:
        names |= added
    assert names == set(declared)


def own_extras(requirement: str) -> list[str]:
    found = re.fullmatch(r"orchestrrl\[(.*)\]", requirement)
    return found[1].split(",") if found else []


def test_client_needs_only_its_dependencies(unpacked: Path) -> None:
    absent = {package for packages in PACKAGES.values() for package in packages} - {"aiohttp"} | {*OF_MAIN}
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {', '.join(CLIENT_MODULES)} as last"
    code += "; print(last.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(unpacked)}, cwd=unpacked, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(unpacked))


@needs_vllm
def test_client_changes_no_version_beside_vllm(dist: Path) -> None:
    line = [str(VLLM_PYTHON), "-m", "pip", "install", "--dry-run", "--quiet", "--no-index", "--report", "-"]
    line += ["--find-links", str(dist), "orchestrrl-client[adapters]"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [each["metadata"]["name"] for each in json.loads(done.stdout)["install"]] == ["orchestrrl-client"]
