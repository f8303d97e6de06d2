"""`orchestrrl sim paper`: the paper's figures made again, beside what it reports."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrrl.cli.command import command
from orchestrrl.cli.output import Output, View, table
from orchestrrl.cli.progress import with_progress
from orchestrrl.cli.sim.generation import make_folder, parts_of
from orchestrrl.core.errors import ProblemFaults

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrrl.lab.scoreboard.run import Made


@command
def paper(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and seeds: under 3 minutes.")] = False,
    figures: Annotated[str, typer.Option(help="Comma-separated figures, such as 13,14. Default: all.")] = "",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where figures are kept.")] = Path("out/paper"),
    processes: Annotated[int, typer.Option(min=0, help="Side by side. 0: as many as there are cores.")] = 0,
    write_docs: Annotated[Path | None, typer.Option(metavar="PAGE.md", help="Write them as a page, too.")] = None,
) -> Output:
    """The paper's figures made again from first principles, beside what it reports; and what is beyond them.

    What differs by over 15 % says why. All of it takes under 30 minutes on two cores; an interrupted run goes on.

    Example: `orchestrrl sim paper --quick --figures 15,20`
    """
    from orchestrrl.lab.scoreboard.page import page
    from orchestrrl.lab.scoreboard.run import as_json, chosen, make

    logging.getLogger("orchestrrl").setLevel(logging.ERROR)
    wanted = chosen(parts_of(figures))
    make_folder(out, "--out")
    made = with_progress(lambda report: make(wanted, quick, out, report, processes=processes or None))
    if write_docs is not None:
        _write(write_docs, page(made))
    wrote = [] if write_docs is None else [f"wrote {write_docs}"]
    return Output({"quick": quick, "figures": [as_json(each) for each in made]}, _view(made, wrote))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProblemFaults([f"--write-docs: {error.strerror}, got {str(path)!r}"]) from None


def _view(made: "Sequence[Made]", wrote: "Sequence[str]") -> View:
    from orchestrrl.lab.scoreboard.page import COLUMNS, counted
    from orchestrrl.lab.scoreboard.run import all_rows

    yield table("The paper's figures, and ours", {"figure": "figure", **COLUMNS}, all_rows(made))
    yield counted(all_rows(made))
    yield from (f"figure {each.id} quickly: {each.quick}" for each in made if each.quick)
    yield from wrote
