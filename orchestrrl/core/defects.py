"""Count unexpected exceptions in parts of the daemon, log each exception that differs from the previous one of the same
part, and keep the latest exceptions for `orchestrrl status`.

A part is a loop or a long-running task of the daemon. An exception ends the current turn (iteration) of the part, and
the next turn begins as usual.
"""

import asyncio
import logging
import sysconfig
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from orchestrrl.core.clock import Clock
from orchestrrl.core.errors import OrchestrRLError, cut

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Parts that change the fleet on their own: the two loops, and the tasks they start.
FAST_LOOP, SLOW_LOOP, MOVES, PLANS = "fast_loop", "slow_loop", "moves", "plans"
ACTING = frozenset({FAST_LOOP, SLOW_LOOP, MOVES, PLANS})
# After this many consecutive turns that ended with the same exception, the daemon stops acting.
REPEATED = 10
# Pauses before a task that ended with an exception is restarted, doubled each time.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
MESSAGE_CHARACTERS = 300

_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), "<frozen")
# When installed, these packages are among the libraries.
_PACKAGES = ("orchestrrl", "planner", "balancer", "ocs_drivers")
_OURS = tuple(f"{Path(__file__).parents[2] / package}/" for package in _PACKAGES)


@dataclass(frozen=True, slots=True)
class Defect:
    """The latest exception of one part of the daemon. Two defects of a part are the same if their types and places are
    equal, even if their messages differ."""

    part: str
    type: str
    place: str  # FILE:LINE, outside libraries if the traceback contains such code
    message: str
    first_s: float
    last_s: float
    running: int = 1  # consecutive turns that ended with it; 0: a later turn succeeded

    def __str__(self) -> str:
        return f"{self.type} at {self.place}: {self.message}"


class Defects:
    """Records the daemon's unexpected exceptions since its start, by part. `on_repeated` is called with each defect
    that has ended `REPEATED` consecutive turns of a part. The callback must not raise."""

    def __init__(self, clock: Clock, on_repeated: Callable[[Defect], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.errors: list[BaseException] = []  # the first of each kind, for callers that re-raise them
        self.tasks: dict[asyncio.Task[Any], str] = {}  # running turns that were started as tasks, with their parts
        self._clock = clock
        self._on_repeated = on_repeated
        self._latest: dict[str, Defect] = {}
        self._traced: set[tuple[str, str, str]] = set()  # part, type and place of logged tracebacks

    @property
    def latest(self) -> tuple[Defect, ...]:
        """The latest defect of each part, oldest first."""
        return tuple(sorted(self._latest.values(), key=lambda defect: defect.last_s))

    def met(self, part: str, error: BaseException) -> None:
        """Record that a turn of `part` ended with the exception `error`."""
        now_s, before = self._clock.now_s(), self._latest.get(part)
        message = cut(_printable(error), MESSAGE_CHARACTERS)
        defect = Defect(part, type(error).__qualname__, _place(error), message, now_s, now_s)
        if before is not None and (before.type, before.place) == (defect.type, defect.place):
            defect = replace(defect, first_s=before.first_s, running=before.running + 1)
        else:
            self._log(defect, error)
        self.counts[part] += 1
        self._latest[part] = defect
        if defect.running == REPEATED:
            self._on_repeated(defect)

    def passed(self, part: str) -> None:
        """Record that a turn of the part succeeded."""
        defect = self._latest.get(part)
        if defect is not None and defect.running:
            self._latest[part] = replace(defect, running=0)

    def begin(self, part: str, turn: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start one turn of the part as a task, and return the task. If the turn ends with an OrchestrRLError, the
        error is logged but not counted as a defect, because it is expected and may not recur in the next turn."""
        task = asyncio.create_task(turn)
        self.tasks[task] = part
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        part = self.tasks.pop(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.passed(part)
        elif isinstance(error, OrchestrRLError):
            logger.error("%s failed: %s", part, error)
        else:
            self.met(part, error)

    def start_anew(self) -> None:
        """Reset the count of consecutive equal exceptions for every part."""
        for part in list(self._latest):
            self.passed(part)

    def _log(self, defect: Defect, error: BaseException) -> None:
        """Log the exception on one line. The traceback is added for the first unexpected exception of each part, type
        and place."""
        key = (defect.part, defect.type, defect.place)
        traced = key in self._traced or isinstance(error, OrchestrRLError)
        if not traced:
            self._traced.add(key)
            self.errors.append(error)
        logger.error("%s: a turn ended with an exception: %s", defect.part, defect, exc_info=None if traced else error)


def is_cancelled() -> bool:
    """Return whether the current task was cancelled. This distinguishes a cancellation of the task from a
    CancelledError that the task's own work raised."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def keep_running(part: str, work: Callable[[], Awaitable[None]], defects: Defects, clock: Clock) -> None:
    """Run `work` until it returns or is cancelled. If `work` raises an exception, record the exception and restart
    `work` after a pause, because a defect in one part must not end the daemon."""
    pause_s = FIRST_PAUSE_S
    while True:
        began_s = clock.now_s()
        try:
            return await work()
        except (Exception, asyncio.CancelledError) as error:
            if is_cancelled():
                raise
            if clock.now_s() - began_s > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
                defects.passed(part)
            defects.met(part, error)
        await clock.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _place(error: BaseException) -> str:
    """Return the file and line where the exception was raised. If a library raised it, return the line in this
    project's code that called the library."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_OURS) or not frame.filename.startswith(_LIBRARIES)]
    if not frames:
        return "unknown"
    frame = (ours or frames)[-1]
    path = Path(frame.filename)
    return f"{path.parent.name}/{path.name}:{frame.lineno}"


def _printable(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # a message that cannot be formatted must not hide the exception
        return "(the message cannot be formatted)"
    return text.encode(errors="backslashreplace").decode()
