"""Show progress: live reports, progress bars, and polling of a daemon that may be unreachable for a while."""

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
    """Yield a function that shows a report. On a terminal, the function redraws the `picture` of the report in place.
    Elsewhere, it prints the `news` since the previous report, one line per change. If `aside` is True, it prints the
    news on standard error in both cases, so that standard output contains only the result."""
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
    """Show the reports of an operation that runs in the daemon, as `showing` does, and return the last report. Ctrl-C
    leaves the operation running. In this case, print the `advice` for the latest report and exit with status
    `EXIT_LEFT`."""
    import asyncio

    latest: Report | None = None
    try:
        with showing(picture, news, aside) as show:
            async for latest in reports:
                show(latest)
    except asyncio.CancelledError:
        note(f"\n{advice(latest)}")
        raise typer.Exit(EXIT_LEFT) from None
    assert latest is not None, "the stream raises if it ends without a report"
    return latest


async def persistently(
    fetch: Callable[[Report | None], AsyncIterator[Report]], is_over: Callable[[Report], bool], away: str
) -> AsyncIterator[Report]:
    """Yield the reports of `fetch` until `is_over` is true for a report. While the daemon is unreachable, call `fetch`
    repeatedly with the latest report, and print `away` only once. If the daemon is unreachable before the first report,
    raise the error."""
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
            raise OutcomeUnknown("the daemon closed the call without a response")
        if is_over(latest):
            return
        if not noted:
            note(away)
        noted = True
        await asyncio.sleep(POLL_EVERY_S)


def with_progress(work: Callable[[Callable[[str, int, int], None]], Result]) -> Result:
    """Show a progress bar on standard error while `work` runs, and return the result of `work`. The argument of `work`
    is a function that updates the bar with a description, the number of finished items and the total number."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    name = TextColumn("{task.description:40}", markup=False)
    with Progress(
        name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=stderr(), transient=True
    ) as bars:
        task = bars.add_task("", total=None)
        return work(lambda what, done, total: bars.update(task, description=what, completed=done, total=total or None))
