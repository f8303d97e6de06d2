"""Output and exit status of commands. Results are written to standard output, and all other text to standard error."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from orchestrrl.core.errors import OutcomeUnknown, Permanent, ProblemFaults, Retryable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    View = Iterator[RenderableType]
else:
    View = Iterator  # for annotations

EXIT_FAILURE = 1  # the command was valid and failed
EXIT_MALFORMED = 2  # malformed input or usage; nothing was changed
EXIT_INFEASIBLE = 3  # a well-formed problem without a feasible solution
EXIT_LEFT = 130  # as shells return for Ctrl-C: the outcome is unknown

# Width of the output to a pipe, in columns: wide enough to keep each row of a table on one line.
PIPE_COLUMNS = 200
EMPTY = "-"
_FIGURE = re.compile(r"[-+]?\d")

Row = TypeVar("Row")
Getter = str | Callable[[Any], object]  # a key or attribute of the row, or a function of the row
Columns = Mapping[str, Getter]


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command.

    `document` is printed with --json, and `view` is printed without --json. A view is a table, plain text, or an
    iterable of lines with rich markup and other renderables, which is consumed only when printed. If `failure` is not
    None, the command exits with `status` and prints `failure` as the error message. An empty message is not printed.
    """

    document: Any
    view: "Iterable[RenderableType] | Table | str"
    failure: str | None = None
    status: int = EXIT_FAILURE

    def emit(self, as_json: bool) -> None:
        if as_json:
            print_json(self.document)
        else:
            print_view(self.view)
        if self.failure:
            fail(self.failure, self.status)
        if self.failure is not None:
            raise typer.Exit(self.status)


@cache
def stdout() -> "Console":
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


@cache
def stderr() -> "Console":
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """Print one JSON object on standard output. Keys keep their order. Raises ValueError if a number is NaN or
    infinite."""
    sys.stdout.write(_json_text(value))


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def print_line(line: str) -> None:
    """Print one line and flush standard output, so that a pipe receives it immediately."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_view(view: "Iterable[RenderableType] | Table | str") -> None:
    """Print a view. Lines and table titles are never wrapped, so that text in them can be found with grep."""
    from rich.table import Table

    if isinstance(view, str):
        sys.stdout.write(view)
        return
    for block in view if isinstance(view, Iterable) else [view]:
        if isinstance(block, Table) and block.title:  # rich would wrap a title that is wider than its table
            stdout().print(block.title, style="table.title", soft_wrap=True)
            block.title = None
        stdout().print(block, soft_wrap=isinstance(block, str))


def note(text: str) -> None:
    """Print a progress message with rich markup on standard error."""
    stderr().print(text, soft_wrap=True)


def table(title: str, columns: Columns, rows: Iterable[Row]) -> "Table":
    """Return a table with one row per item of `rows`. Each column's getter extracts its cell from the item."""
    return cells_table(title, tuple(columns), (row_of(row, columns) for row in rows))


def row_of(row: object, columns: Columns) -> tuple[object, ...]:
    """Return the cells of a row, extracted by the columns' getters."""
    return tuple(_cell(row, get) for get in columns.values())


def cells_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> "Table":
    """Return a table of cells. Numeric columns are right-aligned. Columns without any value are omitted, except the
    first. None and empty strings are shown as `-`, and booleans as `yes` and `no`. Cells that are rich Text objects
    keep their style."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [
        [value if isinstance(value, Text) else Text(_shown(value), overflow="fold") for value in row] for row in rows
    ]
    made = Table(title=title or None, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    values = [[row[place].plain for row in cells if row[place].plain != EMPTY] for place in range(len(columns))]
    shown = [place for place in range(len(columns)) if not place or values[place] or not cells]
    for place in shown:
        figures = place > 0 and all(map(_FIGURE.match, values[place]))
        made.add_column(columns[place], justify="right" if figures else "left", no_wrap=place == 0)
    for row in cells:
        made.add_row(*(row[place] for place in shown))
    return made


def _cell(row: Any, get: Getter) -> object:
    if callable(get):
        return get(row)
    return row[get] if isinstance(row, Mapping) else getattr(row, get)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return EMPTY if value is None or value == "" else str(value)


def fields(value: object, names: str, **renamed: str) -> dict[str, Any]:
    """Return attributes of a value as a JSON object. `names` lists the attributes, separated by spaces. `renamed` maps
    further keys to attributes."""
    pairs = {name: name for name in names.split()} | renamed
    return {name: getattr(value, attribute) for name, attribute in pairs.items()}


def fail(message: str, status: int = EXIT_FAILURE) -> NoReturn:
    """Print an error as plain text on standard error, and exit with `status`."""
    sys.stderr.write(message.rstrip("\n") + "\n")
    raise typer.Exit(status)


def raise_faults(faults: Iterable[str]) -> None:
    """Raise ProblemFaults with all `faults`, if there are any."""
    if found := list(faults):
        raise ProblemFaults(found)


def choice_faults(flag: str, value: object, known: Iterable[object]) -> list[str]:
    """Return a list with an error message if `value` is not one of the `known` values. Otherwise, return an empty
    list."""
    names = list(map(str, known))
    return [] if value in names else [f"{flag}: must be one of {', '.join(names)}, got {value!r}"]


def number_faults(wish: str, holds: Callable[[float], bool], **values: float) -> list[str]:
    """Return an error message for each option whose value does not satisfy `holds`. `values` maps parameter names to
    values, and `wish` describes the condition, such as `> 0`."""
    return [
        f"--{name.replace('_', '-')}: must be {wish}, got {value:g}"
        for name, value in values.items()
        if not holds(value)
    ]


def yaml_values(flag: str, given: Iterable[str], faults: list[str]) -> dict[str, Any]:
    """Parse options given as NAME=VALUE, such as `one_session=true`, and return the YAML values by name. Errors are
    appended to `faults`."""
    import yaml

    values: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        try:
            if not equals or not name.isidentifier():
                raise ValueError("must be NAME=VALUE")
            values[name] = yaml.safe_load(value)
        except (ValueError, yaml.YAMLError) as error:
            faults.append(f"{flag}: {error}, got {text!r}")
    return values


def write_file(path: Path, text: str, option: str = "") -> None:
    """Write `text` to the file `path`. If the file cannot be written, report the error as `writing` does."""
    with writing(path, option):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path, option: str = "") -> Iterator[None]:
    """Print an error message and exit if the body raises OSError. With `option`, raise ProblemFaults that names the
    option instead."""
    try:
        yield
    except OSError as error:
        if option:
            raise ProblemFaults([f"{option}: cannot write {str(path)!r}: {error.strerror}"]) from None
        fail(f"{path}: cannot be written: {error.strerror}")


def write_json(path: Path, document: Any) -> None:
    """Write a JSON document to the file `path` in the format of `print_json`."""
    write_file(path, _json_text(document))


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print an error message and exit with a nonzero status if the body raises one of OrchestrRL's errors, or if an
    argument is not valid UTF-8. Other exceptions are not caught."""
    try:
        yield
    except ProblemFaults as error:
        fail(str(error), EXIT_MALFORMED)
    except Retryable as error:
        fail(f"{error} (temporary: retry in {error.after_s:g} s)")
    except OutcomeUnknown as error:
        fail(f"{error} (the outcome is unknown: check the state before you retry)")
    except Permanent as error:
        fail(str(error))
    except UnicodeEncodeError as error:  # an argument is not valid UTF-8
        fail(f"must be UTF-8 text, got {error.object!r}", EXIT_MALFORMED)
