"""A trainer that stands by while its version goes straight into engines: what the daemon asks is done by the backend's
sender, in the thread that publishes, since tensors may have to be gathered by all ranks at once.
"""

import json
import logging
import queue
from collections.abc import Callable, Mapping
from typing import Any

from orchestrrl.core.errors import OrchestrRLError
from orchestrrl.weights.backends.base import WeightSender, trainer_step_from
from orchestrrl.weights.controller.reports import SyncReport

logger = logging.getLogger(__name__)

DONE, FAILED = "done", "failed"  # as the daemon knows them
Relay = Callable[[str, int, str, str], str]  # sync, number, call and body; both bodies as JSON


class TrainerCallbackLoop:
    """Of one publication. `on_report` may be called from any thread, with None when it is over."""

    def __init__(self, sender: WeightSender, relay: Relay) -> None:
        self._sender = sender
        self._relay = relay
        self._news: queue.SimpleQueue[SyncReport | None] = queue.SimpleQueue()

    def on_report(self, report: SyncReport | None) -> None:
        self._news.put(report)

    def run(self) -> None:
        """Until it is over. What goes wrong in a step is told to the daemon, which may ask anew."""
        done: set[tuple[str, int]] = set()
        while (report := self._news.get()) is not None:
            asked = trainer_step_from(report.trainer_step_json)
            if asked is None or (report.id, asked.number) in done:
                continue
            done.add((report.id, asked.number))
            sync_id, number = report.id, asked.number

            def relay(
                call: str, body: Mapping[str, Any], sync_id: str = sync_id, number: int = number
            ) -> Mapping[str, Any]:
                told: Mapping[str, Any] = json.loads(self._relay(sync_id, number, call, json.dumps(dict(body))))
                return told

            try:
                self._sender.act(asked, relay)
            except Exception as error:  # the product's own, of any kind
                logger.warning("version %d: %s: %s", report.version, asked.step, error, exc_info=True)
                self._answer(relay, FAILED, {"why": f"could not {asked.step}: {type(error).__name__}: {error}"})
            else:
                self._answer(relay, DONE, {})

    def _answer(self, tell: Callable[[str, Mapping[str, Any]], Any], call: str, body: Mapping[str, Any]) -> None:
        try:
            tell(call, body)
        except OrchestrRLError as error:  # that is not asked any more, or the daemon is away: the report tells
            logger.warning("%s", error)
