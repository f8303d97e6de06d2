"""Store the intents and the outcomes of communication periods. Both are journalled, so that they survive a restart.

Trainers announce many periods per minute. A period that changes no circuits is counted instead of journalled if a
period of the same job and name was journalled with the same outcome less than 10 seconds earlier. The count is part of
the next entry that is journalled for this job and name.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from orchestrrl.core.errors import OrchestrRLError, Permanent
from orchestrrl.core.journal.store import EntryKind, Journal
from orchestrrl.fabric.intents import intent_to_json, parse_intent
from orchestrrl.fabric.periods import PERIOD, PeriodReport, PeriodState
from planner.fabric.intent import Intent, Stage
from planner.fabric.windows import SwitchTimes

logger = logging.getLogger(__name__)

REMEMBERED = 1024
WRITTEN_AGAIN_AFTER = 5000  # journal entries: old ones are dropped, and an intent may be announced only once
ALIKE_FOR_S = 10.0

_Key = tuple[str, str]  # two jobs may use the same period names


class PeriodBook:
    """The announced intents and the reports of ended periods. Construction recovers them from the journal."""

    def __init__(self, journal: Journal) -> None:
        self.over: deque[PeriodReport] = deque(maxlen=REMEMBERED)
        self.counts: Counter[tuple[str, str]] = Counter()  # of periods that ended since the start, by state and code
        self._journal = journal
        self._intents: dict[_Key, Intent] = {}
        self._written: dict[_Key, int] = {}  # the journal position of each intent
        self._alike: dict[_Key, tuple[str, str, float]] = {}  # the last journalled ending of each
        self._untold: Counter[_Key] = Counter()  # unjournalled endings like it since then
        for entry in journal.tail(REMEMBERED, (EntryKind.PERIOD_INTENT,)):
            intent = journal.interpret(entry, partial(_intent_from, entry.subject))
            if intent is not None:
                self._remember(intent, entry.sequence)
        for entry in journal.tail(REMEMBERED, (EntryKind.PERIOD,)):
            report = journal.interpret(entry, PERIOD.validate_python)
            if report is not None:
                self.over.append(report)

    def record(self, intent: Intent, now_s: float) -> None:
        """Store the intent under its job and period name. Raises Permanent if the intent cannot be journalled."""
        written = self._written.get(_key(intent))
        last = self._journal.last_sequence
        if self._intents.get(_key(intent)) != intent or written is None or last - written >= WRITTEN_AGAIN_AFTER:
            body = {"intent": intent_to_json(intent)}
            written = self._journal.append(now_s, EntryKind.PERIOD_INTENT, intent.period, body)
        self._remember(intent, written)

    def intent(self, period: str, job: str = "") -> Intent:
        """Return the last intent that the job announced for this period. If there is none, return the intent that was
        announced for the period without a job. If that intent is also missing and `job` is empty, return the intent of
        the only job that announced the period. Raises Permanent if no intent or several intents match."""
        found = self._found(period, job)
        if len(found) > 1:
            listing = ", ".join(sorted(repr(each.job) for each in found))
            raise Permanent(f"period {period!r} was announced by several jobs ({listing}); name one of them")
        if not found:
            known = ", ".join(sorted({name for _, name in self._intents})[:16]) or "none yet"
            of = f" of job {job!r}" if job else ""
            raise Permanent(
                f"period {period!r}{of} was never announced with an intent; periods with an intent: {known}"
            )
        return found[0]

    def get(self, period: str, job: str) -> Intent | None:
        """Return the intent that the method `intent` returns, or None if no intent or several intents match."""
        found = self._found(period, job)
        return found[0] if len(found) == 1 else None

    def _found(self, period: str, job: str) -> list[Intent]:
        for key in ((job, period), ("", period)):
            if key in self._intents:
                return [self._intents[key]]
        return [] if job else [each for each in self._intents.values() if each.period == period]

    def training(self) -> Iterable[Intent]:
        """Return the last training intent of each job that has announced one."""
        return {each.job: each for each in self._intents.values() if each.stage is Stage.TRAIN}.values()

    def ended(self, report: PeriodReport, now_s: float) -> None:
        self.over.append(report)
        self.counts[report.state, report.code] += 1
        key = report.job, report.period
        state, code, at_s = self._alike.get(key, ("", "", 0.0))
        if not report.commits and (report.state, report.code) == (state, code) and now_s - at_s < ALIKE_FOR_S:
            self._untold[key] += 1
            return
        body = PERIOD.dump_python(report, mode="json", exclude_defaults=True)
        if alike := self._untold.pop(key, 0):
            body["alike_before"] = alike
        try:
            self._journal.append(now_s, EntryKind.PERIOD, report.id, body)
        except OrchestrRLError as error:  # the period is over in any case
            logger.error("period %s cannot be journalled: %s", report.id, error)
        self._alike[key] = report.state, report.code, now_s
        if len(self._alike) > REMEMBERED:
            del self._alike[next(iter(self._alike))]

    def switch_times(self) -> Iterator[SwitchTimes]:
        """Return an iterator over the measured durations of commits in the stored reports, oldest first."""
        return (each for report in self.over for commit in report.commits for each in commit.switch_times)

    def up(self) -> Iterator[Intent]:
        """Yield the intents of the stored periods whose circuits came up, oldest first."""
        for report in self.over:
            if report.state is PeriodState.COMMITTED and (intent := self.get(report.period, report.job)):
                yield intent

    def _remember(self, intent: Intent, sequence: int) -> None:
        self._intents.pop(_key(intent), None)
        self._intents[_key(intent)] = intent  # the latest is last
        self._written[_key(intent)] = sequence
        if len(self._intents) > REMEMBERED:
            oldest = next(iter(self._intents))
            del self._intents[oldest], self._written[oldest]


def _intent_from(period: str, body: Mapping[str, Any]) -> Intent:
    return parse_intent(period, body["intent"])


def _key(intent: Intent) -> _Key:
    return intent.job, intent.period
