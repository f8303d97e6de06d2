"""How commands show what is under way: reports as they come, bars, and polling a daemon that may be away."""

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import typer

from orchestrrl.cli.output import EXIT_LEFT, note, stderr, stdout
from orchestrrl.core.errors import OutcomeUnknown, Retryable

if TYPE_CHECKING:
    from rich.console import RenderableType

Report = TypeVar("Report")
Result = TypeVar("Result")
POLL_EVERY_S = 0.5


@contextmanager
def showing(
    picture: "Callable[[Report], RenderableType]", news: Callable[[Report | None, Report], Iterable[str]], aside: bool
) -> Iterator[Callable[[Report], None]]:
    """Yield a function that shows a report: on a terminal as a picture renewed in place, in a pipe as a line for each
    change since the report before. `aside` keeps standard output free for the result."""
    latest: list[Report] = []
    if aside or not stdout().is_terminal:
        console = stderr() if aside else stdout()

        def show(report: Report) -> None:
            for line in news(latest[0] if latest else None, report):
                console.print(line, soft_wrap=True)
            latest[:] = [report]

        yield show
        return
    from rich.live import Live

    with Live(
        console=stdout(),
        transient=True,
        refresh_per_second=4,
        get_renderable=lambda: picture(latest[0]) if latest else "",
    ):
        yield lambda report: latest.__setitem__(slice(None), [report])


async def until_over(
    reports: AsyncIterator[Report],
    picture: "Callable[[Report], RenderableType]",
    news: Callable[[Report | None, Report], Iterable[str]],
    advice: Callable[[Report | None], str],
    aside: bool,
) -> Report:
    """Show the reports of something that runs by itself, and return the last. Ctrl-C leaves it running: the exit status
    is `EXIT_LEFT` then, after a note of what can be done about it."""
    import asyncio

    latest: Report | None = None
    try:
        with showing(picture, news, aside) as show:
            async for latest in reports:
                show(latest)
    except asyncio.CancelledError:
        note(f"\n{advice(latest)}")
        raise typer.Exit(EXIT_LEFT) from None
    assert latest is not None, "the stream raises where it ends without a report"
    return latest


async def persistently(
    fetch: Callable[[Report | None], AsyncIterator[Report]], is_over: Callable[[Report], bool], away: str
) -> AsyncIterator[Report]:
    """Yield reports until one is over. `fetch` is called again with the latest report after the daemon has been away,
    which is noted once; before the first report its absence is an error."""
    import asyncio

    latest: Report | None = None
    noted = False
    while True:
        try:
            async for report in fetch(latest):
                latest, noted = report, False
                yield report
        except (Retryable, OutcomeUnknown):
            if latest is None:
                raise
        if latest is None:
            raise OutcomeUnknown("the daemon ended the call without an answer")
        if is_over(latest):
            return
        if not noted:
            note(away)
        noted = True
        await asyncio.sleep(POLL_EVERY_S)


def with_progress(work: Callable[[Callable[[str, int, int], None]], Result]) -> Result:
    """Return the result of the work, while a bar on standard error shows how far it is."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    name = TextColumn("{task.description:40}", markup=False)
    with Progress(
        name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=stderr(), transient=True
    ) as bars:
        task = bars.add_task("", total=None)
        return work(lambda what, done, total: bars.update(task, description=what, completed=done, total=total or None))
