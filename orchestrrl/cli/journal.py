"""`orchestrrl journal`: print the daemon's record of observations, decisions and operations."""

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer

from orchestrrl.cli.command import stream_command
from orchestrrl.cli.formats import time_of_day
from orchestrrl.cli.lazy import ControlClient, control_pb2
from orchestrrl.core.errors import cut
from orchestrrl.core.journal.kinds import EntryKind
from orchestrrl.rpc.plain_values import plain

BODY_CHARACTERS = 200


def entry_of(message: "control_pb2.JournalEntry") -> dict[str, Any]:
    """Return the journal entry as plain values, with its JSON body parsed into `body`."""
    entry = plain(message)
    entry["body"] = json.loads(entry.pop("body_json") or "{}")
    return entry


def entry_text(entry: dict[str, Any]) -> str:
    body = cut(" ".join(f"{name}={json.dumps(value)}" for name, value in entry["body"].items()), BODY_CHARACTERS)
    start = f"{entry['sequence']:>7} {time_of_day(entry['at_unix_s'])} g{entry['generation']} {entry['kind']:<18}"
    return f"{start} {entry['subject_id']} {body}".rstrip()


@stream_command(entry_text)
async def journal(
    client: ControlClient,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new entries until Ctrl-C.")] = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=0, help="Maximum number of recent entries.")] = 20,
    kinds: Annotated[
        list[EntryKind] | None,
        typer.Option("--kind", metavar="KIND", help="Print only entries of this kind. Can be repeated."),
    ] = None,
) -> AsyncIterator[dict[str, Any]]:
    """Print the newest journal entries, one per line. Long lines are cut. With --json, each line is one complete JSON
    object.

    Example: `orchestrrl journal --follow --kind operation.result`
    """
    wanted = control_pb2.WatchJournalRequest(tail=limit, follow=follow, kinds=kinds or [])
    async for message in client.watch(client.control.WatchJournal, wanted):
        yield entry_of(message)
