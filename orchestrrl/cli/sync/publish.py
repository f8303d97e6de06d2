"""`orchestrrl sync publish`: publish a checkpoint folder as the fleet's weights, without a trainer."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from orchestrrl.cli.command import DaemonOption, JsonFlag, address_faults, command
from orchestrrl.cli.formats import size
from orchestrrl.cli.lazy import sync_text as words
from orchestrrl.cli.output import EXIT_LEFT, Output, note, raise_faults
from orchestrrl.cli.progress import showing
from orchestrrl.core.addresses import DEFAULT_TARGET
from orchestrrl.core.errors import Permanent

if TYPE_CHECKING:
    from orchestrrl.weights.controller.reports import SyncReport
    from orchestrrl.weights.trainer.boxes import TensorPiece
    from orchestrrl.weights.trainer.client import PublishInProgress, WeightsClient

POLL_EVERY_S = 0.25
LARGEST = 2**64 - 1
PATIENCE_S = 15.0  # wait for a daemon that is unreachable or has no report of the peer yet


@command
def publish(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The checkpoint folder.")],
    peer: Annotated[str, typer.Option(metavar="PEER", help="The --id of the peer on this host.")],
    policy_version: Annotated[
        int | None, typer.Option(min=0, max=LARGEST, help="Version number. Default: the fleet's plus one.")
    ] = None,
    peer_folder: Annotated[Path | None, typer.Option(help="The peer's --folder, if it has one.")] = None,
    next_pause: Annotated[
        bool, typer.Option("--next-pause", help="Install when the pause barrier closes next, not immediately.")
    ] = False,
    daemon: DaemonOption = DEFAULT_TARGET,
    as_json: JsonFlag = False,
) -> Output:
    """Publish a checkpoint folder of safetensors files, single or sharded, in the format of Hugging Face's libraries.

    Use this command to return to an earlier checkpoint or to test. Trainers publish with
    `orchestrrl.weights.trainer.client` instead. Run the command on the host of a peer, because the tensors are copied
    to the peer's folder. The command exits when the sync ends or, with `--next-pause`, when every host has the version.
    Ctrl-C leaves the sync running.

    The exit status is 0 if every engine has the version or installs it at the next pause. It is 1 if the fleet has the
    previous version or engines are quarantined.

    Example: `orchestrrl sync publish checkpoints/step-400 --peer train0`
    """
    # Imported here so that other commands start without numpy.
    from orchestrrl.rpc.codecs.weights import report_to_pb
    from orchestrrl.rpc.plain_values import plain
    from orchestrrl.weights.trainer.client import WeightsClient

    pieces = _pieces(folder, peer, peer_folder, daemon)
    with WeightsClient(daemon, peer=peer, folder=peer_folder, patience_s=PATIENCE_S) as client:
        number = client.next_version() if policy_version is None else policy_version
        total = size(sum(piece.bytes for piece in pieces))
        note(f"version {number}: staging {len(pieces)} tensors, {total}, in {escape(str(client.folder))}")
        report = _carried(client, number, pieces, next_pause, as_json)
    document = plain(report_to_pb(report))
    if report.over:
        return Output(document, [words.outcome(report)], words.failure(report))
    now = "[bold]orchestrrl sync install[/bold]"
    text = f"{words.named(report)} is on every host: installed when the pause barrier closes next, or with {now}"
    return Output(document, [text])


def _pieces(folder: Path, peer: str, peer_folder: Path | None, daemon: str) -> "list[TensorPiece]":
    """Return the tensors of the checkpoint in `folder`. Raises ProblemFaults with all errors if arguments are
    invalid."""
    from orchestrrl.weights.peer.arguments import FOLDERS
    from orchestrrl.weights.trainer.staging import checkpoint_pieces

    faults = address_faults(daemon)
    home = peer_folder or Path(f"{FOLDERS}{peer}")
    if not peer or "/" in peer:
        faults.append(f"--peer: must be the id of a peer, got {peer!r}")
    elif not home.is_dir():
        option = "--peer-folder" if peer_folder else "--peer"
        faults.append(f"{option}: no peer has the folder {home} on this host: start `orchestrrl sync peer` first")
    pieces: list[TensorPiece] = []
    try:
        pieces = checkpoint_pieces(folder)
    except Permanent as error:
        faults += [f"FOLDER: {line}" for line in str(error).splitlines()]
    raise_faults(faults)
    return pieces


def _carried(
    client: "WeightsClient", version: int, pieces: "list[TensorPiece]", next_pause: bool, as_json: bool
) -> "SyncReport":
    """Publish a version, and return the last report once the sync has ended or waits for the next pause. Raises
    OrchestrRLError if the version cannot be published."""
    from orchestrrl.weights.trainer.client import SyncAborted

    handle: PublishInProgress = client.start_publish_arrays(version, pieces, install="next_pause" if next_pause else "")
    try:
        with showing(words.picture, words.news, aside=as_json) as show:
            while not handle.done():
                report = handle.report
                if report is not None and not report.over:
                    show(report)
                    if _waits_for_barrier(report):
                        return report
                time.sleep(POLL_EVERY_S)
    except KeyboardInterrupt:
        note(f"\n{words.GOES_ON}")
        raise typer.Exit(EXIT_LEFT) from None
    try:
        return handle.result()
    except SyncAborted as aborted:
        return aborted.report


def _waits_for_barrier(report: "SyncReport") -> bool:
    from orchestrrl.weights.controller.reports import SyncPhase

    return any(took.phase is SyncPhase.NEXT_PAUSE and took.ended_s is None for took in report.phases)
