"""`orchestrrl journal`: what the daemon saw, decided and did, from its record."""

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.control import DaemonOption, follow
from orchestrrl.cli.formats import time_of_day
from orchestrrl.cli.lazy import control_pb2
from orchestrrl.cli.output import JsonFlag
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.journal.kinds import EntryKind
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    from orchestrrl.rpc.control_client import ControlClient

BODY_CHARACTERS = 200


def journal(
    follow_on: Annotated[bool, typer.Option("--follow", "-f", help="Go on with each new entry until Ctrl-C.")] = False,
    tail: Annotated[int, typer.Option("--tail", "-n", min=0, help="How many of the newest entries first.")] = 20,
    kinds: Annotated[
        list[EntryKind] | None, typer.Option("--kind", metavar="KIND", help="Only entries of this kind; repeat it.")
    ] = None,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> None:
    """Print the newest entries of the journal, one a line. Long ones are cut; with --json each is a whole JSON object.

    Example: `orchestrrl journal --follow --kind operation.result`
    """

    async def conversation(client: "ControlClient") -> None:
        wanted = control_pb2.WatchJournalRequest(tail=tail, follow=follow_on, kinds=kinds or [])
        async for message in client.watch(client.control.WatchJournal, wanted):
            entry = entry_of(message)
            print_line(json.dumps(entry) if as_json else entry_text(entry))

    follow(daemon, conversation)


def entry_of(message: "control_pb2.JournalEntry") -> dict[str, Any]:
    """The entry with its body as an object."""
    entry = plain(message)
    entry["body"] = json.loads(entry.pop("body_json") or "{}")
    return entry


def entry_text(entry: dict[str, Any]) -> str:
    body = shorten(" ".join(f"{name}={json.dumps(value)}" for name, value in entry["body"].items()))
    start = f"{entry['sequence']:>7} {time_of_day(entry['at_unix_s'])} g{entry['generation']} {entry['kind']:<18}"
    return f"{start} {entry['subject_id']} {body}".rstrip()


def shorten(text: str) -> str:
    return text if len(text) <= BODY_CHARACTERS else text[: BODY_CHARACTERS - 3] + "..."


def print_line(line: str) -> None:
    """One line at once, also into a pipe: somebody follows."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def register(app: typer.Typer) -> None:
    app.command()(journal)
