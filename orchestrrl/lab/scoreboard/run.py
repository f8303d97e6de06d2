"""Make figures, side by side in processes of this machine; what was made before is not made again."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from orchestrrl.core.errors import Permanent
from orchestrrl.lab.scoreboard.figures import FIGURES
from orchestrrl.lab.scoreboard.kept import Made, code_digest, read, write
from orchestrrl.lab.scoreboard.model import Report, ScoreboardPart

LOOKS_S = 0.25  # between two looks at how far figures are

Told = tuple[str, str, int, int]  # figure, what is under way, done, in all
_tell: "SimpleQueue[Told] | None" = None


def make(
    figures: Sequence[ScoreboardPart], quick: bool, folder: Path, report: Report, *, processes: int | None = None
) -> list[Made]:
    """In the order given. Raises Permanent where one cannot be made; those that were made are kept."""
    code = code_digest()
    found = {figure.id: made for figure in figures if (made := read(folder, figure.id, quick, code)) is not None}
    waiting = [figure for figure in figures if figure.id not in found]
    report("kept from before", len(found), len(figures))
    for made in _made([figure.id for figure in waiting], quick, processes, _reporting(report, found, len(figures))):
        write(folder, made, quick, code)
        found[made.id] = made
        report(f"figure {made.id} done", len(found), len(figures))
    return [found[figure.id] for figure in figures]


def make_one(figure: ScoreboardPart, quick: bool, report: Report) -> Made:
    started_s = time.perf_counter()
    rows = tuple(figure.make(quick, report))
    return Made(figure.id, figure.title, figure.quick if quick else "", rows, time.perf_counter() - started_s)


def _reporting(report: Report, found: Mapping[str, Made], total: int) -> Callable[[Mapping[str, Told]], None]:
    def on_progress(under_way: Mapping[str, Told]) -> None:
        words = "; ".join(f"{id}: {what} ({done}/{of})" for id, what, done, of in under_way.values())
        report(words, len(found), total)

    return on_progress


def _made(
    ids: Sequence[str], quick: bool, processes: int | None, told: Callable[[Mapping[str, Told]], None]
) -> Iterator[Made]:
    """As they come. The longest are begun first."""
    if not ids:
        return
    context = multiprocessing.get_context("forkserver")
    queue: SimpleQueue[Told] = context.SimpleQueue()
    most = min(len(ids), processes or len(os.sched_getaffinity(0)))
    with _ending(ProcessPoolExecutor(most, context, _begin, (queue,))) as pool:
        running: dict[Future[Made], str] = {pool.submit(_work, id, quick): id for id in sorted(ids, key=_rank)}
        under_way: dict[str, Told] = {}
        while running:
            done, _ = wait(running, LOOKS_S, FIRST_COMPLETED)
            while not queue.empty():
                row = queue.get()
                under_way[row[0]] = row
            for each in done:
                under_way.pop(id := running.pop(each), None)
                yield _result(each, id)
            told(under_way)


# Of those that take minutes, the longest first; others behind them.
LONGEST_FIRST = ("17", "13-moe", "9", "16", "additions", "10", "18", "13-dense", "14")


def _rank(id: str) -> tuple[int, int]:
    order = [figure.id for figure in FIGURES]
    return (LONGEST_FIRST.index(id) if id in LONGEST_FIRST else len(LONGEST_FIRST), order.index(id))


def _result(future: "Future[Made]", id: str) -> Made:
    try:
        return future.result()
    except BrokenProcessPool:
        raise Permanent(f"the process that made figure {id} died; run it again, with less memory in use") from None


@contextmanager
def _ending(pool: ProcessPoolExecutor) -> Iterator[ProcessPoolExecutor]:
    """Whoever is interrupted does not wait for what is under way."""
    try:
        yield pool
        pool.shutdown()
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise


def _begin(queue: "SimpleQueue[Told]") -> None:
    import logging

    global _tell
    _tell = queue
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    logging.getLogger("orchestrrl").setLevel(logging.ERROR)


def _work(id: str, quick: bool) -> Made:
    figure = next(each for each in FIGURES if each.id == id)

    def report(what: str, done: int, total: int) -> None:
        if _tell is not None:
            _tell.put((id, what, done, total))

    return make_one(figure, quick, report)
