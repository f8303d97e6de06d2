"""The flags of `orchestrrl up`: errors, and the command lines of its processes."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from orchestrrl.cli.gateway import ServingFlags
from orchestrrl.cli.main import application, load
from orchestrrl.cli.up.children import ChildCommand, agent_command, daemon_command, gateway_command

text = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1).filter(lambda each: each[0] != "-")
flags = st.builds(
    ServingFlags,
    listen=text,
    engines=st.lists(text, max_size=3),
    engine_kind=text,
    operator=text,
    allow_remote=st.booleans(),
    policy=text,
    drain_s=st.floats(0, 1e6),
    processes=st.integers(1, 64),
    ledger=st.none() | text.map(Path),
    log_level=text,
)


def parsed(command: ChildCommand) -> dict[str, Any]:
    """Return the values that the command receives from its command line."""
    module, package, name, *words = command.words[1:]
    assert (module, package) == ("-m", "orchestrrl")
    values: dict[str, Any] = load(name).make_context(name, words).params
    return values


@given(flags)
def test_gateway_receives_all_flags(given_flags: ServingFlags) -> None:
    values = parsed(gateway_command(given_flags, "127.0.0.1:7070"))
    assert values.pop("daemon") == "127.0.0.1:7070"
    expected = vars(given_flags)
    assert {name: list(values[name] or ()) if name == "engines" else values[name] for name in expected} == expected


@given(flags)
def test_agent_and_daemon_receive_their_flags(given_flags: ServingFlags) -> None:
    values = parsed(agent_command(given_flags, "127.0.0.1:7070", "agent-h-8000"))
    assert (values["daemon"], values["agent_id"]) == ("127.0.0.1:7070", "agent-h-8000")
    assert (list(values["engines"] or ()), values["engine_kind"]) == (given_flags.engines, given_flags.engine_kind)
    assert values["log_level"] == given_flags.log_level
    values = parsed(daemon_command(given_flags, "127.0.0.1:7070", Path("c.yaml"), "act"))
    assert (values["listen"], values["config"], values["mode"]) == ("127.0.0.1:7070", Path("c.yaml"), "act")
    assert (values["allow_remote"], values["log_level"]) == (given_flags.allow_remote, given_flags.log_level)
    assert parsed(daemon_command(given_flags, "127.0.0.1:7070", Path("c.yaml"), None))["mode"] is None


def test_all_errors_are_reported_before_a_process_starts(tmp_path: Path) -> None:
    config = tmp_path / "orchestrrl.yaml"
    config.write_text("mode: fly\n")
    words = ["--engine", "ftp://e", "--engine-kind", "abacus", "--listen", "0.0.0.0:1", "--operator", "x"]
    words += [
        "--policy",
        "fair",
        "--drain-s",
        "-1",
        "--log-level",
        "loud",
        "--daemon",
        "unix:/run/d",
        "-c",
        str(config),
    ]
    result = CliRunner().invoke(application(), ["up", *words])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == [
        *("mode", "--listen", "--operator", "--engine[0]", "--policy", "--drain-s", "--log-level", "--engine-kind"),
        "--daemon",
    ]


@pytest.mark.parametrize("words", [[], ["--daemon", "127.0.0.1:7070"]])
def test_engine_is_required_without_a_configuration(words: list[str]) -> None:
    result = CliRunner().invoke(application(), ["up", *words])
    assert (result.exit_code, result.stderr) == (2, "--engine: is required without --config\n")
