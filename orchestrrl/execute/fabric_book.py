"""What is kept of periods: their intents by name, and what became of each. Journalled; lasts over restarts.

Trainers announce many times a minute. What ends as its predecessor of the same name did, with nothing changed, is
counted, and written down with the next that is.
"""

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from orchestrrl.errors import OrchestrRLError, Permanent, ProblemFaults
from orchestrrl.fabric_intents import intent_to_json, parse_intent
from orchestrrl.journal import Journal, Kind
from orchestrrl.periods import PERIOD, PeriodReport, PeriodState, SwitchTook
from planner.fabric.intent import Intent, Stage

logger = logging.getLogger(__name__)

REMEMBERED = 1024
WRITTEN_AGAIN_AFTER = 5000  # entries: old ones are dropped, and an intent may be announced once for all
ALIKE_FOR_S = 10.0


class PeriodBook:
    """Construction recovers what the journal holds."""

    def __init__(self, journal: Journal) -> None:
        self.over: deque[PeriodReport] = deque(maxlen=REMEMBERED)
        self.counts: Counter[tuple[str, str]] = Counter()  # of periods that ended since the start, by state and code
        self._journal = journal
        self._intents: dict[str, Intent] = {}
        self._written: dict[str, int] = {}  # where in the journal each intent stands
        self._alike: dict[str, tuple[str, str, float]] = {}  # how each name ended when it was written down last
        self._untold: Counter[str] = Counter()  # endings alike since then
        for entry in journal.tail(REMEMBERED, (Kind.PERIOD_INTENT,)):
            try:
                self._remember(parse_intent(entry.subject, entry.body["intent"]), entry.sequence)
            except ProblemFaults as error:
                logger.warning("the intent of %s is left out: %s", entry.subject, error)
        for entry in journal.tail(REMEMBERED, (Kind.PERIOD,)):
            self.over.append(PERIOD.validate_python({k: v for k, v in entry.body.items() if k != "alike_before"}))

    def know(self, intent: Intent, now_s: float) -> None:
        """Under its name, from now on. Raises Permanent where that cannot be written down."""
        written = self._written.get(intent.period)
        last = self._journal.last_sequence
        if self._intents.get(intent.period) != intent or written is None or last - written >= WRITTEN_AGAIN_AFTER:
            body = {"intent": intent_to_json(intent)}
            written = self._journal.append(now_s, Kind.PERIOD_INTENT, intent.period, body)
        self._remember(intent, written)

    def intent(self, period: str) -> Intent:
        """Raises Permanent for a name that nobody has given one to."""
        if period not in self._intents:
            known = ", ".join(sorted(self._intents)[:16]) or "none yet"
            raise Permanent(f"period {period!r} was never announced with an intent (known: {known})")
        return self._intents[period]

    def get(self, period: str) -> Intent | None:
        return self._intents.get(period)

    def training(self) -> Iterable[Intent]:
        """What each job that trains announced last of its training."""
        return {each.job: each for each in self._intents.values() if each.stage is Stage.TRAIN}.values()

    def ended(self, report: PeriodReport, now_s: float) -> None:
        self.over.append(report)
        self.counts[report.state, report.code] += 1
        state, code, at_s = self._alike.get(report.period, ("", "", 0.0))
        if not report.commits and (report.state, report.code) == (state, code) and now_s - at_s < ALIKE_FOR_S:
            self._untold[report.period] += 1
            return
        body = PERIOD.dump_python(report, mode="json", exclude_defaults=True)
        if alike := self._untold.pop(report.period, 0):
            body["alike_before"] = alike
        try:
            self._journal.append(now_s, Kind.PERIOD, report.id, body)
        except OrchestrRLError as error:  # it is over all the same
            logger.error("period %s cannot be written down: %s", report.id, error)
        self._alike[report.period] = report.state, report.code, now_s
        if len(self._alike) > REMEMBERED:
            del self._alike[next(iter(self._alike))]

    def took(self) -> Iterator[SwitchTook]:
        """How long commits have taken, oldest first."""
        return (each for report in self.over for commit in report.commits for each in commit.took)

    def up(self) -> Iterator[Intent]:
        """Those whose circuits came up, oldest first, as far as that is remembered."""
        for report in self.over:
            if report.state is PeriodState.COMMITTED and (intent := self.get(report.period)) is not None:
                yield intent

    def _remember(self, intent: Intent, sequence: int) -> None:
        self._intents.pop(intent.period, None)
        self._intents[intent.period] = intent  # the latest stand last
        self._written[intent.period] = sequence
        if len(self._intents) > REMEMBERED:
            oldest = next(iter(self._intents))
            del self._intents[oldest], self._written[oldest]
