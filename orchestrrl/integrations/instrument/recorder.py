"""Notes the start and the end of each collective of torch.distributed in shared memory, and what the trainer marks.

Switched on by one line in the program,

    import recorder; recorder.start()

or without any: with this folder's `startup` on PYTHONPATH and ORCHESTRRL_RECORDER set, to 1 or to the directory of the
rings. It is there before torch is imported or after; torch is not imported for it. The memory itself is made with the
first collective or mark. Whatever goes wrong with recording is said once in the log, and the program goes on without.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from orchestrrl.integrations.instrument import rings
    from orchestrrl.integrations.instrument.collective_hooks import CollectiveHooks
else:  # in the traced process, where this folder is on the path
    import rings
    from collective_hooks import CollectiveHooks

SWITCH = "ORCHESTRRL_RECORDER"
JOB = "ORCHESTRRL_RECORDER_JOB"
KEEP_DEAD_S = 3600.0  # what a dead process left is removed by its reader, or after so long by whoever starts next

logger = logging.getLogger("orchestrrl.recorder")


class Recorder:
    """One per process. `stop` leaves everything as it was before."""

    def __init__(self, directory: Path, job: str) -> None:
        self._directory, self._job = directory, job
        self._writer: rings.RingWriter | None = None
        self._off = False
        self._warned: set[str] = set()
        self.hooks = CollectiveHooks(self.writer, self.warn_once)
        self._awaiting = _Awaiting("torch", self._torch_is_there)

    def install(self) -> None:
        self._awaiting.begin()

    def stop(self) -> None:
        self._off = True
        self._awaiting.end()
        self.hooks.remove()
        if self._writer is not None:
            self._writer.close()

    def _torch_is_there(self) -> None:
        try:
            self.hooks.install()
        except Exception as fault:  # noqa: BLE001  # torch may be other than it was: the program goes on
            self.warn_once(f"not everything is recorded: {fault!r}")

    def forked(self) -> None:
        """In the child: the parent's memory is left alone, one's own is made when something is to be noted."""
        if self._writer is not None:
            self._writer.abandon()
        self._writer = None
        self.hooks.forked()

    def writer(self) -> rings.RingWriter | None:
        """Where to write; None where nothing is recorded any more."""
        if self._writer is None and not self._off:
            try:
                with contextlib.suppress(OSError):
                    rings.remove_dead(self._directory, older_than_s=KEEP_DEAD_S)
                self._writer = rings.RingWriter(self._directory, job=self._job)
            except OSError as fault:
                self._off = True
                self.warn_once(f"nothing is recorded: {self._directory}: {fault}")
        return self._writer

    @property
    def path(self) -> Path | None:
        """The ring; None where nothing has been noted yet."""
        return None if self._writer is None else self._writer.path

    def warn_once(self, message: str) -> None:
        """Once, however often it happens."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


# The same for both names under which this module may be imported into one process.
_process: Any = sys.modules.setdefault("_orchestrrl_recorder", ModuleType("_orchestrrl_recorder"))
_process.__dict__.setdefault("recorder", None)


def start(directory: str | os.PathLike[str] | None = None, *, job: str | None = None) -> None:
    """Record from now on; nothing where it is on already.

    `directory`: of the rings; else what ORCHESTRRL_RECORDER says, else `rings.DEFAULT_DIRECTORY`. `job`: a name for the
    reader, else what ORCHESTRRL_RECORDER_JOB says. DistributedDataParallel, which reduces its gradients outside of
    Python, is given a communication hook that computes the same at its first forward, where it has none.
    """
    if _process.recorder is not None:
        return
    said = os.environ.get(SWITCH, "")
    chosen = Path((said if "/" in said else rings.DEFAULT_DIRECTORY) if directory is None else directory)
    _process.recorder = Recorder(chosen, os.environ.get(JOB, "") if job is None else job)
    _process.recorder.install()


def stop() -> None:
    """Record no more, and leave torch as it was. What is recorded stays for its reader."""
    stopped, _process.recorder = _process.recorder, None
    if stopped is not None:
        stopped.stop()


def current() -> Recorder | None:
    """What records in this process."""
    found: Recorder | None = _process.recorder
    return found


@contextlib.contextmanager
def mark(name: str) -> Iterator[None]:
    """What the trainer does inside: `forward`, `backward`, `optimizer`, `weight_send`."""
    writer = _writing()
    sequence = writer.mark(name) if writer else 0
    try:
        yield
    finally:
        if writer:
            writer.end_mark(sequence)


def moment(name: str) -> None:
    """Something happened now."""
    if writer := _writing():
        writer.moment(name)


def iteration(number: int) -> None:
    """An iteration of the training begins."""
    if writer := _writing():
        writer.moment("iteration", number)


def announce(period: str, body: str | dict[str, Any]) -> None:
    """The communication period that comes next, for the daemon. `body`: JSON. Raises ValueError above 3.5 KiB."""
    text = json.dumps({"period": period, "body": json.loads(body) if isinstance(body, str) else body})
    payload = text.encode()
    if len(payload) > rings.PAYLOAD_BYTES:
        raise ValueError(f"body: must leave the announcement under {rings.PAYLOAD_BYTES} bytes, it has {len(payload)}")
    if writer := _writing():
        writer.announce("announce", payload)


def _writing() -> rings.RingWriter | None:
    recorder = current()
    return None if recorder is None else recorder.writer()


class _Awaiting(importlib.abc.MetaPathFinder):
    """Calls back when a module has been imported; at once where it has been already."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name, self._call = name, call
        self._ended = False

    def begin(self) -> None:
        if self._name in sys.modules:
            self._call()
        else:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        self._ended = True
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # it may be there later
            return None
        execute = spec.loader.exec_module

        def and_call(module: ModuleType) -> None:
            execute(module)
            if not self._ended:
                self._call()

        spec.loader.exec_module = and_call  # type: ignore[method-assign]
        return spec


def _forked() -> None:
    if _process.recorder is not None:
        _process.recorder.forked()


if not hasattr(_process, "forked"):
    _process.forked = _forked
    os.register_at_fork(after_in_child=_forked)
