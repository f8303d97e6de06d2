"""Run tasks in parallel, each in its own process on this machine. A crash affects only the task of the crashed process,
and all processes end when their parent ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

GRACE_S = 5.0
Task = TypeVar("Task")
Result = TypeVar("Result")


def run_tasks(
    work: Callable[[Task], Result], tasks: Sequence[Task], at_once: int | None = None, preload: Sequence[str] = ()
) -> Iterator[tuple[Task, Result | Exception]]:
    """Yield each task with its result as it completes: the value or exception of `work`, or ChildProcessError if the
    process died. `at_once` is the maximum number of processes, by default one per available core. `preload` lists
    modules that are imported once, before the processes are forked."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    most = at_once or len(os.sched_getaffinity(0))
    waiting, running = list(reversed(tasks)), dict[BaseProcess, tuple[Task, Connection]]()
    try:
        while waiting or running:
            while waiting and len(running) < most:
                task = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_run, args=(work, task, theirs), daemon=True)
                process.start()
                theirs.close()
                running[process] = task, ours
            # A pipe is readable once its process has sent its result or ended.
            readable = wait([pipe for _, pipe in running.values()])
            for process in [each for each, (_, pipe) in running.items() if pipe in readable]:
                task, pipe = running.pop(process)
                yield task, _result(process, pipe)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _run(work: Callable[[Any], Any], task: object, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pipe.send(work(task))
    except Exception as error:  # noqa: BLE001  the parent yields it as the task's result
        pipe.send(error)


def _end_with_parent() -> None:
    """Exit when the parent process ends, even if the parent was killed, or was interrupted before it recorded this
    process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _result(process: BaseProcess, pipe: Connection) -> Any:
    try:
        result = pipe.recv()
    except EOFError:
        process.join()
        result = ChildProcessError(f"the process of the task ended with status {process.exitcode}")
    pipe.close()
    process.join()
    return result
