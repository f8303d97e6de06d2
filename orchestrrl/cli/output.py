"""What a command prints and how it ends: results on standard output, everything else on standard error."""

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

EXIT_FAILURE = 1  # the command was understood and did not succeed
EXIT_MALFORMED = 2  # malformed input or usage; nothing was done
EXIT_INFEASIBLE = 3  # a well-formed problem without a feasible answer
EXIT_LEFT = 130  # as shells have it for Ctrl-C: the outcome is not known

# A pipe has no width of its own: wide enough that tables keep their rows on one line each.
PIPE_COLUMNS = 200
EMPTY = "-"
_FIGURE = re.compile(r"[-+]?\d")

Row = TypeVar("Row")
Getter = str | Callable[[Any], object]  # a key or attribute of the row, or a function of the row
Columns = Mapping[str, Getter]


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command.

    `document` is what --json prints. `view` is what people read: lines with rich's markup and other renderables, which
    an iterator makes only where they are printed; a table; or a text that is written as it is. `failure` is the message
    of exit status `status`; an empty one is not printed.
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
    """Print one JSON object, alone on standard output. Keys keep their order; NaN is a defect and raises."""
    sys.stdout.write(_json_text(value))


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=1, allow_nan=False) + "\n"


def print_line(line: str) -> None:
    """Print one line at once, also into a pipe."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def print_view(view: "Iterable[RenderableType] | Table | str") -> None:
    """Print lines and titles of tables, never broken, so that they can be searched in a pipe, and other renderables as
    they are."""
    from rich.table import Table

    if isinstance(view, str):
        sys.stdout.write(view)
        return
    for block in view if isinstance(view, Iterable) else [view]:
        if isinstance(block, Table) and block.title:  # which rich would break where it is wider than the table
            stdout().print(block.title, style="table.title", soft_wrap=True)
            block.title = None
        stdout().print(block, soft_wrap=isinstance(block, str))


def note(text: str) -> None:
    """Print a line about the progress of a command on standard error, with rich's markup."""
    stderr().print(text, soft_wrap=True)


def table(title: str, columns: Columns, rows: Iterable[Row]) -> "Table":
    """Return a table with a row for each of `rows`, whose cells the columns' getters find."""
    return cells_table(title, tuple(columns), (row_of(row, columns) for row in rows))


def row_of(row: object, columns: Columns) -> tuple[object, ...]:
    """Return the cells that the columns' getters find in a row."""
    return tuple(_cell(row, get) for get in columns.values())


def cells_table(title: str, columns: Sequence[str], rows: Iterable[Iterable[object]]) -> "Table":
    """Return a table of cells. Columns of figures are aligned to the right; all but the first column are left out where
    no row has a value there. None and empty text show as `-`, booleans as yes and no; rich's Text keeps its style."""
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
    """Return the attributes `names` of a value, and those that have another name in the document, as a JSON object."""
    pairs = {name: name for name in names.split()} | renamed
    return {name: getattr(value, attribute) for name, attribute in pairs.items()}


def fail(message: str, status: int = EXIT_FAILURE) -> NoReturn:
    """Print an error on standard error, as plain lines, and exit."""
    sys.stderr.write(message.rstrip("\n") + "\n")
    raise typer.Exit(status)


def raise_faults(faults: Iterable[str]) -> None:
    """Raise ProblemFaults if there are any."""
    if found := list(faults):
        raise ProblemFaults(found)


def choice_faults(flag: str, value: object, known: Iterable[object]) -> list[str]:
    """Return the fault of a value that is none of the known ones."""
    names = list(map(str, known))
    return [] if value in names else [f"{flag}: must be one of {', '.join(names)}, got {value!r}"]


def number_faults(wish: str, holds: Callable[[float], bool], **values: float) -> list[str]:
    """Return a fault for each option, by the name of its parameter, whose value is not as wished."""
    return [
        f"--{name.replace('_', '-')}: must be {wish}, got {value:g}"
        for name, value in values.items()
        if not holds(value)
    ]


def yaml_values(flag: str, given: Iterable[str], faults: list[str]) -> dict[str, Any]:
    """Return options given as NAME=VALUE, such as `one_session=true`; values are those of YAML. Adds to `faults`."""
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
    """Write a result, or end the command with the reason why it cannot be written."""
    with writing(path, option):
        path.write_text(text, encoding="utf-8")


@contextmanager
def writing(path: Path, option: str = "") -> Iterator[None]:
    """End the command with the reason where the body cannot write the file, which an option may have named."""
    try:
        yield
    except OSError as error:
        if option:
            raise ProblemFaults([f"{option}: cannot be written: {error.strerror}, got {str(path)!r}"]) from None
        fail(f"{path}: cannot be written: {error.strerror}")


def write_json(path: Path, document: Any) -> None:
    """Write a result as print_json prints it."""
    write_file(path, _json_text(document))


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn our errors into a message and the contract's exit status. Defects of our own still show a traceback."""
    try:
        yield
    except ProblemFaults as error:
        fail(str(error), EXIT_MALFORMED)
    except Retryable as error:
        fail(f"{error} (may succeed later: try again in {error.after_s:g} s)")
    except OutcomeUnknown as error:
        fail(f"{error} (it may have happened: look before trying again)")
    except Permanent as error:
        fail(str(error))
    except UnicodeEncodeError as error:  # of an argument whose bytes are no text
        fail(f"must be UTF-8 text, got {error.object!r}", EXIT_MALFORMED)
