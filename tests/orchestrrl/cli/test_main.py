"""The table of commands agrees with the modules, and declared defaults and choices agree with the implementation."""

import inspect
from enum import Enum
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from orchestrrl.cli.commands import GROUPS, MODULE_OF, summary
from orchestrrl.cli.fleet import pause as barrier
from orchestrrl.cli.fleet import status
from orchestrrl.cli.fleet.engine import simulated
from orchestrrl.cli.gateway import gateway
from orchestrrl.cli.main import application, load
from orchestrrl.cli.ocs.emulate import PROTOCOLS
from orchestrrl.core.operations import FrozenRequests, PauseMode
from orchestrrl.gateway.ledger.store import BATCH_S
from orchestrrl.gateway.routing.strategies import DEFAULT_POLICY, DEFAULT_SLACK, STRATEGIES
from orchestrrl.lab.emulated_switch import PROTOCOLS as EMULATED_PROTOCOLS
from orchestrrl.lab.simulated_engine.server import SimulatedOptions
from planner.model import Mode


@pytest.mark.parametrize("path", MODULE_OF)
def test_summary_is_the_first_paragraph_of_the_help(path: str) -> None:
    start = inspect.cleandoc(load(path).help or "").partition("\n\n")[0]
    assert summary(path) == " ".join(start.split())


def test_groups_and_commands_are_listed() -> None:
    assert {path.partition(" ")[0] for path in MODULE_OF if " " in path} == GROUPS.keys()
    for group in ("", *GROUPS):
        shown = CliRunner().invoke(application(), [*group.split(), "--help"], env={"COLUMNS": "200"}).stdout
        inside = [path.removeprefix(group).split()[0] for path in MODULE_OF if path.startswith(f"{group} ".lstrip())]
        assert all(f" {name} " in shown for name in inside)


def test_declared_defaults_match_the_implementation() -> None:
    options = SimulatedOptions()
    for name, parameter in inspect.signature(simulated).parameters.items():
        if name in SimulatedOptions.model_fields and name not in ("lengths", "misreport"):
            assert parameter.default == getattr(options, name), name
    assert EMULATED_PROTOCOLS == PROTOCOLS
    flags = inspect.signature(gateway).parameters
    kept = {"affinity_slack": DEFAULT_SLACK, "keep_from_s": BATCH_S}
    assert {name: flags[name].default for name in kept} == kept
    assert flags["policy"].default == DEFAULT_POLICY
    assert flags["policy"].annotation.__metadata__[0].help == " | ".join(STRATEGIES)


@pytest.mark.parametrize(
    ("written", "meant"),
    [(status.ModeOption, Mode), (barrier.PauseModeOption, PauseMode), (barrier.FrozenRequestsOption, FrozenRequests)],
)
def test_declared_choices_match_the_enumerations(written: Any, meant: type[Enum]) -> None:
    assert {each.upper(): each for each in get_args(written)} == {each.name: each.value for each in meant}


def test_invalid_values_are_rejected_as_by_typer() -> None:
    for words, fault in (
        (["requests", "--limit", "-1"], "--limit"),
        (["requests", "--limit", "many"], "--limit"),
        (["mode", "fly"], "advise"),
        (["plan", "solve"], "FILE.json"),
    ):
        shown = CliRunner().invoke(application(), words)
        assert shown.exit_code == 2
        assert fault in shown.output
