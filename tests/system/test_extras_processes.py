"""Commands in an environment without the packages of the extras: one process runs them all."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrrl.cli.commands import MODULE_OF
from orchestrrl.cli.extras import EXTRA_OF, PACKAGES

ROOT = Path(__file__).parents[2]
# An import of a module that is None in sys.modules raises ModuleNotFoundError, as if it was not installed.
CODE = """
import json, sys
packages, lines = json.load(sys.stdin)
sys.modules.update(dict.fromkeys(packages))
from typer.testing import CliRunner
from orchestrrl.cli.main import application
results = [CliRunner().invoke(application(), line, env={"COLUMNS": "200"}) for line in lines]
print(json.dumps([(each.exit_code, each.stdout, each.stderr, repr(each.exception)) for each in results]))
"""
NEEDS = "orchestrrl {} needs the extra \"{}\": pip install 'orchestrrl[{}]'\n"


def run_without_extras(lines: list[list[str]]) -> list[Any]:
    packages = sorted({package for packages in PACKAGES.values() for package in packages} | {"pandas"})
    code = [sys.executable, "-c", CODE]
    done = subprocess.run(code, input=json.dumps([packages, lines]), capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.smoke
def test_base_installation_has_help_and_names_the_missing_extra(tmp_path: Path) -> None:
    site, config = ROOT / "deploy/examples/site.yaml", tmp_path / "orchestrrl.yaml"
    config.write_text("mode: advise\n")
    arguments = {
        "daemon": ["-c", str(config)],
        "engine simulated": ["--port", "1"],
        "plan solve": ["-"],
        "sync plan": ["-"],
        "profile fit": ["-"],
        "profile score": ["-"],
        "fabric allocate": ["-"],
        "fabric place": ["-"],
        "fabric transition": ["-"],
        "sim run": ["cluster64"],
        "sim compare": ["cluster64"],
        "sim report": [str(tmp_path)],
        "sim daemon-config": ["cluster64"],
        "sim split": ["cluster64"],
        "sim sweep": [str(config)],
    }
    missing = [[*path.split(), *arguments.get(path, [])] for path in EXTRA_OF]
    works = [["--help"], ["--version"], *([*path.split(), "--help"] for path in MODULE_OF)]
    works += [["check-config", str(config)], ["fabric", "check", str(site)], ["profile", "predict", "qwen2.5-14b"]]
    plot = ["fabric", "show", str(site), "--svg", str(tmp_path / "site.svg")]
    switch = ["ocs", "emulate", "--protocol", "restconf"]
    *results, plotted, emulated = run_without_extras([*works, *missing, plot, switch])
    for line, (status, out, err, exception) in zip(works, results[: len(works)], strict=True):
        assert (status, bool(out)) == (0, True), (line, err, exception)
    for (path, extra), (status, out, err, _) in zip(EXTRA_OF.items(), results[len(works) :], strict=True):
        assert (status, out, err) == (2, "", NEEDS.format(path, extra, extra))
    assert (plotted[0], plotted[2]) == (2, NEEDS.format("fabric show with these options", "sim", "sim"))
    words = "--protocol: restconf needs aiohttp, which is not installed; run pip install 'orchestrrl[ocs]'\n"
    assert (emulated[0], emulated[2]) == (2, words)
