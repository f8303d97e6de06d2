"""Switches as the journal has them: whoever carries them out writes them down so, and who only reads finds them."""

import logging
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orchestrrl.journal import JournalReader, Kind
from orchestrrl.switch import SwitchReport

logger = logging.getLogger(__name__)

_REPORT = TypeAdapter(SwitchReport)

# Read at once; the journal may have more.
REMEMBERED = 256


def report_to_body(report: SwitchReport) -> dict[str, Any]:
    """The body of an entry."""
    body: dict[str, Any] = _REPORT.dump_python(report, mode="json")
    return body


def report_from_body(body: Mapping[str, Any]) -> SwitchReport | None:
    """None: another version wrote it, or it tells of something else."""
    try:
        return _REPORT.validate_python(body)
    except ValidationError:
        return None


def recorded(journal: JournalReader, limit: int = 0) -> list[SwitchReport]:
    """Switches that have ended, newest first; 0: all that are remembered."""
    found: list[SwitchReport] = []
    for entry in reversed(journal.tail(REMEMBERED, (Kind.DEPLOYMENT_ENDED,))):
        report = report_from_body(entry.body.get("report", entry.body))
        if report is not None:
            found.append(report)
    return found[:limit] if limit else found
