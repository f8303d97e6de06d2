"""The `orchestrrl` command: one Typer application that finds commands in a table and imports them on first use."""

import functools
import importlib
import inspect
import io
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from orchestrrl import __version__
from orchestrrl.cli import garbage
from orchestrrl.cli.commands import GROUPS, MODULE_OF, PANEL_OF, function_names, summary
from orchestrrl.cli.extras import with_extra
from orchestrrl.cli.output import reporting_errors

_SETTINGS: dict[str, Any] = {
    "name": "orchestrrl",
    "no_args_is_help": True,
    "rich_markup_mode": "markdown",
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "help": "Control plane for LLM reinforcement learning: monitors vLLM servers, plans parallelism, moves requests.",
}


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"orchestrrl {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


class TableGroup(TyperGroup):
    """A command group that lists its commands from the table of commands. It imports a command when the command is
    resolved: to run it, to print its help, or to complete its options."""

    def __init__(self, *, prefix: str = "", **settings: Any) -> None:
        super().__init__(**settings)
        self.prefix = prefix
        for path in MODULE_OF:
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and " " not in name:
                self.add_command(TyperCommand(name, rich_help_panel=PANEL_OF.get(path)))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.help is None:
            command.help = summary(self.prefix + cmd_name)
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        spare_conversions(self, ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if self.prefix + args[0] in MODULE_OF:
            command = load(self.prefix + args[0])
            spare_conversions(command, ctx)
            self.add_command(command)
        return super().resolve_command(ctx, args)


class _Root(TableGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        markup: Any = _SETTINGS["rich_markup_mode"]
        for name, (text, panel) in GROUPS.items():
            shown = {"help": text, "rich_help_panel": panel, "rich_markup_mode": markup}
            self.add_command(TableGroup(name=name, prefix=f"{name} ", no_args_is_help=True, **shown))


@functools.cache
def load(path: str) -> Any:
    """Import and return the command at `path`, such as `plan solve`."""
    module = importlib.import_module(f"orchestrrl.cli.{MODULE_OF[path]}")
    function = next(filter(inspect.isfunction, map(vars(module).get, function_names(path))))

    @functools.wraps(function)
    def run(**values: Any) -> None:
        with reporting_errors(), with_extra(path):
            function(**values)

    app = typer.Typer(add_completion=False, **_SETTINGS)
    app.command(path.rpartition(" ")[2])(run)
    return typer.main.get_command(app)


def spare_conversions(command: Any, ctx: Any) -> None:
    """Skip Typer's conversion for values that do not need it: None, strings for string parameters, and defaults. Typer
    converts with pydantic, which takes longer to import than most commands take to run."""
    for parameter in command.get_params(ctx):
        # Only newer Typer versions have a type descriptor; each parameter is patched once.
        if hasattr(parameter, "type_descriptor") and "process_value" not in vars(parameter):
            parameter.process_value = functools.partial(_process, parameter, parameter.process_value)


def _process(parameter: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    wanted, many = parameter.type_descriptor.annotation, parameter.multiple or parameter.nargs == -1
    if get_origin(wanted) is Literal:
        fits = value in get_args(wanted)
    else:
        fits = isinstance(wanted, type) and isinstance(value, wanted)
    if value is None and (ctx.resilient_parsing or not parameter.required):
        value = () if many else None
    elif not fits or (wanted is not str and value is not parameter.default):  # the value may be out of range
        return convert(ctx, value)
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


@functools.cache
def application() -> typer.Typer:
    return typer.Typer(cls=_Root, callback=_root, **_SETTINGS)


def main() -> None:
    garbage.collect_rarely()
    if isinstance(sys.stdout, io.TextIOWrapper):  # characters that the terminal cannot encode are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    application()()
