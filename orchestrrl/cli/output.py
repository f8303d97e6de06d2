"""How every command speaks: results on standard output, the rest on standard error, faults with exit status 2."""

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from orchestrrl.core.errors import OutcomeUnknown, Permanent, ProblemFaults, Retryable

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILURE = 1  # the command was understood and did not succeed
EXIT_MALFORMED = 2  # malformed input or usage; nothing was done
EXIT_INFEASIBLE = 3  # a well-formed problem without a feasible answer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
ProblemFile = Annotated[str, typer.Argument(metavar="FILE.json", help="The problem; - reads standard input.")]

# A pipe has no width of its own: wide enough that tables keep their rows on one line each.
PIPE_COLUMNS = 200


@cache
def stdout() -> "Console":
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


@cache
def stderr() -> "Console":
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON object, alone on standard output. Keys keep their order; NaN is a defect and raises."""
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    optional: Collection[str] = (),
    left: Collection[str] = (),
) -> None:
    """A table for people. Cells are shown as they are, right-aligned but for the first column and those of words, named
    in `left`: numbers read best so.

    None shows as `-`; an `optional` column without any value is left out.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [list(row) for row in rows]
    shown = [
        index
        for index, column in enumerate(columns)
        if column not in optional or any(row[index] is not None for row in cells)
    ]
    table = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for index in shown:
        justify: Literal["left", "right"] = "left" if index == 0 or columns[index] in left else "right"
        table.add_column(columns[index], justify=justify, no_wrap=index == 0)
    for row in cells:
        table.add_row(*(Text("-" if row[index] is None else str(row[index]), overflow="fold") for index in shown))
    stdout().print(table)


def print_lines(lines: Iterable[str]) -> None:
    """Sentences for people, with rich's markup; never broken, so that they can be searched in a pipe."""
    for line in lines:
        stdout().print(line, soft_wrap=True)


def fail(message: str, status: int = EXIT_FAILURE) -> NoReturn:
    """Say what is wrong on standard error, as plain lines, and exit."""
    sys.stderr.write(message.rstrip("\n") + "\n")
    raise typer.Exit(status)


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
