"""Record the start and end of each torch.distributed collective, and marks of the trainer, in a ring in shared memory
(rings.py).

Recording is enabled by one line in the program:

    import recorder; recorder.start()

It can also be enabled without a change to the program: put this folder's `startup` on PYTHONPATH and set
ORCHESTRRL_RECORDER to 1 or to the directory of the rings. Recording may be enabled before or after torch is imported;
this module does not import torch. The ring is created at the first collective or mark. Each problem with recording is
logged once, and the program continues without recording.
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
KEEP_DEAD_S = 3600.0  # rings of dead processes are removed by their reader, or after this time by the next writer

logger = logging.getLogger("orchestrrl.recorder")


class Recorder:
    """The recorder of a process. A process has at most one recorder. `stop` restores torch to its original state."""

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
        except Exception as fault:  # noqa: BLE001  # another torch may differ: the program must continue
            self.warn_once(f"recording is incomplete: {fault!r}")

    def forked(self) -> None:
        """Reset the recorder in a forked child. The child stops using its parent's ring, and creates its own at its
        first collective or mark."""
        if self._writer is not None:
            self._writer.abandon()
        self._writer = None
        self.hooks.forked()

    def writer(self) -> rings.RingWriter | None:
        """Return the ring writer, which the first call creates. Return None if the writer could not be created, or if
        recording ended before the first call."""
        if self._writer is None and not self._off:
            try:
                with contextlib.suppress(OSError):
                    rings.remove_dead(self._directory, older_than_s=KEEP_DEAD_S)
                self._writer = rings.RingWriter(self._directory, job=self._job)
            except OSError as fault:
                self._off = True
                self.warn_once(f"recording is disabled: {self._directory}: {fault}")
        return self._writer

    @property
    def path(self) -> Path | None:
        """Return the path of the ring, or None if it has not been created yet."""
        return None if self._writer is None else self._writer.path

    def warn_once(self, message: str) -> None:
        """Log a warning, unless the same message has been logged before."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


# State shared by both names under which this module may be imported into one process.
_process: Any = sys.modules.setdefault("_orchestrrl_recorder", ModuleType("_orchestrrl_recorder"))
_process.__dict__.setdefault("recorder", None)


def start(directory: str | os.PathLike[str] | None = None, *, job: str | None = None) -> None:
    """Start recording. Has no effect if recording is already on.

    `directory` is the directory of the rings. The default is the path in ORCHESTRRL_RECORDER, or
    `rings.DEFAULT_DIRECTORY` if that variable contains no path. `job` is the name of the job in the ring's header; the
    default is ORCHESTRRL_RECORDER_JOB.

    DistributedDataParallel reduces gradients in C++ code, where collectives cannot be recorded. At its first forward
    pass, a communication hook is therefore registered that reduces them with the same result, unless it already has a
    hook.
    """
    if _process.recorder is not None:
        return
    said = os.environ.get(SWITCH, "")
    chosen = Path((said if "/" in said else rings.DEFAULT_DIRECTORY) if directory is None else directory)
    _process.recorder = Recorder(chosen, os.environ.get(JOB, "") if job is None else job)
    _process.recorder.install()


def stop() -> None:
    """Stop recording and restore torch to its original state. Recorded events stay in the ring for its reader."""
    stopped, _process.recorder = _process.recorder, None
    if stopped is not None:
        stopped.stop()


def current() -> Recorder | None:
    """Return the recorder of this process, or None if recording is off."""
    found: Recorder | None = _process.recorder
    return found


@contextlib.contextmanager
def mark(name: str) -> Iterator[None]:
    """Mark the enclosed code with the name of a trainer phase: `forward`, `backward`, `optimizer` or `weight_send`."""
    writer = _writing()
    sequence = writer.mark(name) if writer else 0
    try:
        yield
    finally:
        if writer:
            writer.end_mark(sequence)


def moment(name: str) -> None:
    """Record an event that has a name but no duration."""
    if writer := _writing():
        writer.moment(name)


def iteration(number: int) -> None:
    """Record the start of the training iteration `number`."""
    if writer := _writing():
        writer.moment("iteration", number)


def announce(period: str, body: str | dict[str, Any]) -> None:
    """Announce the next communication period, named `period`, to the daemon. `body` is JSON text or a JSON object.
    Raises ValueError if `body` is not valid JSON or the announcement exceeds 3.5 KiB."""
    text = json.dumps({"period": period, "body": json.loads(body) if isinstance(body, str) else body})
    payload = text.encode()
    if len(payload) > rings.PAYLOAD_BYTES:
        raise ValueError(f"body: the announcement must have at most {rings.PAYLOAD_BYTES} bytes, got {len(payload)}")
    if writer := _writing():
        writer.announce("announce", payload)


def _writing() -> rings.RingWriter | None:
    recorder = current()
    return None if recorder is None else recorder.writer()


class _Awaiting(importlib.abc.MetaPathFinder):
    """An import hook that calls a function after a module is imported, or at once if the module is already imported."""

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
            sys.meta_path.insert(0, self)  # a later import may find it
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
