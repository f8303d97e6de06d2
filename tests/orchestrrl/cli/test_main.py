"""The table of commands agrees with the modules, and what only lists, explains or asks imports little."""

import importlib
import inspect
from enum import Enum

import pytest
import typer
from typer.testing import CliRunner

from ocs_drivers.emulators.registry import EMULATORS
from orchestrrl.cli.commands import COMMANDS
from orchestrrl.cli.fleet import pause as barrier
from orchestrrl.cli.fleet import status
from orchestrrl.cli.fleet.engine import simulated
from orchestrrl.cli.gateway import gateway
from orchestrrl.cli.gateway_options import read_options
from orchestrrl.cli.groups import GROUPS
from orchestrrl.cli.main import application, load
from orchestrrl.cli.ocs.emulate import PROTOCOLS
from orchestrrl.cli.ocs.emulator import GRPC
from orchestrrl.core.operations import FrozenRequests, PauseMode
from orchestrrl.gateway.ledger.versions import OnStale
from orchestrrl.gateway.routing.strategies import DEFAULT_POLICY, STRATEGIES
from orchestrrl.lab.simulated_engine.server import SimulatedOptions
from planner.model import Mode


@pytest.mark.parametrize("module", sorted({listed.module for listed in COMMANDS.values()}))
def test_a_module_adds_the_commands_that_it_is_listed_with(module: str) -> None:
    app = typer.Typer()
    importlib.import_module(f"orchestrrl.cli.{module}").register(app)
    commands = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    for each in app.registered_groups:
        assert each.typer_instance
        commands += [f"{each.name} {c.name or c.callback.__name__}" for c in each.typer_instance.registered_commands]
    assert sorted(commands) == sorted(path for path, listed in COMMANDS.items() if listed.module == module)


@pytest.mark.parametrize("path", COMMANDS)
def test_a_command_is_listed_with_the_start_of_its_help(path: str) -> None:
    start = inspect.cleandoc(load(path).help or "").partition("\n\n")[0]
    assert COMMANDS[path].summary == " ".join(start.split())


def test_groups_and_commands_are_listed() -> None:
    assert {path.partition(" ")[0] for path in COMMANDS if " " in path} == GROUPS.keys()
    for group in ("", *GROUPS):
        shown = CliRunner().invoke(application(), [*group.split(), "--help"], env={"COLUMNS": "200"}).stdout
        inside = [path.removeprefix(group).split()[0] for path in COMMANDS if path.startswith(f"{group} ".lstrip())]
        assert all(f" {name} " in shown for name in inside)


def test_written_defaults_are_those_of_what_is_run() -> None:
    options = SimulatedOptions()
    names = {"max_model_len": "max_model_len_tokens"}
    for name, parameter in inspect.signature(simulated).parameters.items():
        if (field := names.get(name, name)) in SimulatedOptions.model_fields and name != "lengths":
            assert parameter.default == getattr(options, field), name
    assert (*sorted(EMULATORS), GRPC) == PROTOCOLS
    flags, options_of = inspect.signature(gateway).parameters, inspect.signature(read_options).parameters
    for name in ("affinity_slack", "keep_from_s", "on_stale"):
        assert flags[name].default == options_of[name].default
    assert flags["policy"].default == DEFAULT_POLICY
    helps = {name: flags[name].annotation.__metadata__[0].help for name in ("policy", "on_stale")}
    assert helps == {"policy": " | ".join(STRATEGIES), "on_stale": f"What becomes of these: {' | '.join(OnStale)}."}


@pytest.mark.parametrize(
    ("written", "meant"),
    [(status.ModeOption, Mode), (barrier.PauseModeOption, PauseMode), (barrier.FrozenRequestsOption, FrozenRequests)],
)
def test_written_choices_are_those_of_what_is_run(written: type[Enum], meant: type[Enum]) -> None:
    assert {each.name: each.value for each in written} == {each.name: each.value for each in meant}


def test_values_are_converted_as_typer_does() -> None:
    for words, fault in (
        (["requests", "--limit", "-1"], "--limit"),
        (["requests", "--limit", "many"], "--limit"),
        (["mode", "fly"], "advise"),
        (["plan", "solve"], "FILE.json"),
    ):
        shown = CliRunner().invoke(application(), words)
        assert shown.exit_code == 2
        assert fault in shown.output
