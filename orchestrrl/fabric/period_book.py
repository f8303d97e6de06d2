"""What is kept of periods: their intents by job and name, and what became of each. Journalled; lasts over restarts.

Trainers announce many times a minute. What ends as its predecessor of the same name did, with nothing changed, is
counted, and written down with the next that is.
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
WRITTEN_AGAIN_AFTER = 5000  # entries: old ones are dropped, and an intent may be announced once for all
ALIKE_FOR_S = 10.0

_Key = tuple[str, str]  # job and period: two jobs may use the same names


class PeriodBook:
    """Construction recovers what the journal holds."""

    def __init__(self, journal: Journal) -> None:
        self.over: deque[PeriodReport] = deque(maxlen=REMEMBERED)
        self.counts: Counter[tuple[str, str]] = Counter()  # of periods that ended since the start, by state and code
        self._journal = journal
        self._intents: dict[_Key, Intent] = {}
        self._written: dict[_Key, int] = {}  # where in the journal each intent stands
        self._alike: dict[_Key, tuple[str, str, float]] = {}  # how each ended when it was written down last
        self._untold: Counter[_Key] = Counter()  # endings alike since then
        for entry in journal.tail(REMEMBERED, (EntryKind.PERIOD_INTENT,)):
            intent = journal.interpret(entry, partial(_intent_from, entry.subject))
            if intent is not None:
                self._remember(intent, entry.sequence)
        for entry in journal.tail(REMEMBERED, (EntryKind.PERIOD,)):
            report = journal.interpret(entry, PERIOD.validate_python)
            if report is not None:
                self.over.append(report)

    def record(self, intent: Intent, now_s: float) -> None:
        """Under its job and name, from now on. Raises Permanent where that cannot be written down."""
        written = self._written.get(_key(intent))
        last = self._journal.last_sequence
        if self._intents.get(_key(intent)) != intent or written is None or last - written >= WRITTEN_AGAIN_AFTER:
            body = {"intent": intent_to_json(intent)}
            written = self._journal.append(now_s, EntryKind.PERIOD_INTENT, intent.period, body)
        self._remember(intent, written)

    def intent(self, period: str, job: str = "") -> Intent:
        """As that job announced it last; or as nobody's, or, of a job without a name, as the only one that did. Raises
        Permanent where there is none."""
        found = self._found(period, job)
        if len(found) > 1:
            listing = ", ".join(sorted(repr(each.job) for each in found))
            raise Permanent(f"period {period!r} is of several jobs, name one: {listing}")
        if not found:
            known = ", ".join(sorted({name for _, name in self._intents})[:16]) or "none yet"
            of = f" of job {job!r}" if job else ""
            raise Permanent(f"period {period!r}{of} was never announced with an intent (known: {known})")
        return found[0]

    def get(self, period: str, job: str) -> Intent | None:
        """The same; None where it is not known, or not of which job."""
        found = self._found(period, job)
        return found[0] if len(found) == 1 else None

    def _found(self, period: str, job: str) -> list[Intent]:
        for key in ((job, period), ("", period)):
            if key in self._intents:
                return [self._intents[key]]
        return [] if job else [each for each in self._intents.values() if each.period == period]

    def training(self) -> Iterable[Intent]:
        """What each job that trains announced last of its training."""
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
        except OrchestrRLError as error:  # it is over all the same
            logger.error("period %s cannot be written down: %s", report.id, error)
        self._alike[key] = report.state, report.code, now_s
        if len(self._alike) > REMEMBERED:
            del self._alike[next(iter(self._alike))]

    def switch_times(self) -> Iterator[SwitchTimes]:
        """How long commits have taken, oldest first."""
        return (each for report in self.over for commit in report.commits for each in commit.switch_times)

    def up(self) -> Iterator[Intent]:
        """Those whose circuits came up, oldest first, as far as that is remembered."""
        for report in self.over:
            if report.state is PeriodState.COMMITTED and (intent := self.get(report.period, report.job)):
                yield intent

    def _remember(self, intent: Intent, sequence: int) -> None:
        self._intents.pop(_key(intent), None)
        self._intents[_key(intent)] = intent  # the latest stand last
        self._written[_key(intent)] = sequence
        if len(self._intents) > REMEMBERED:
            oldest = next(iter(self._intents))
            del self._intents[oldest], self._written[oldest]


def _intent_from(period: str, body: Mapping[str, Any]) -> Intent:
    return parse_intent(period, body["intent"])


def _key(intent: Intent) -> _Key:
    return intent.job, intent.period
