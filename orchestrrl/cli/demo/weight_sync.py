"""What `orchestrrl demo` prints of its weight sync: its phases, as `orchestrrl sync profile` has them, and what became
of requests that ran meanwhile."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.markup import escape

from orchestrrl.cli.formats import duration, size
from orchestrrl.cli.lazy import sync_text as words
from orchestrrl.cli.output import View

if TYPE_CHECKING:
    from orchestrrl.lab.demo.sync_run import SyncOutcome

FAULTS_SHOWN = 5


def sync_demo_view(synced: "SyncOutcome") -> View:
    yield words.phases_table("New weights while requests run", synced.profile)
    yield from _summary(synced)
    yield from words.advice_lines([synced.profile])


def _summary(synced: "SyncOutcome") -> Iterator[str]:
    took = synced.profile
    version = f"version {took.report.version} ({size(took.report.bytes)})"
    still = f"requests stood still for {duration(took.still_s)}"
    yield f"{version}: {synced.serve_it} of {synced.engines} engines have it; {still} of {duration(took.whole_s)}"
    yield (
        f"answers: {synced.answered} of {synced.requests}, {synced.crossed} with tokens of both versions; tokens that"
        f" are not of the version which the answer names: {synced.differing} of {sum(synced.tokens.values()):,}"
    )
    if took.transfer_s:
        yield words.transfer_text(took)
    yield from (escape(note) for note in took.report.notes)
    yield from (f"[red]{escape(fault)}[/red]" for fault in synced.faults[:FAULTS_SHOWN])
