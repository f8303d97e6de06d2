"""Settings for all tests: hypothesis profiles, logging, tiers."""

import ast
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import fork_server

# Enable assertion introspection in this module.
pytest.register_assert_rewrite("orchestrrl.fleet.deployers.conformance")

# The same as in `orchestrrl`, also for tests that load numpy without it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests send SIGINT to processes that they start. Children of a process that ignores it, such as one started by a shell
# in the background, would ignore it too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

fork_server.install()

_parse = ast.parse


def _parse_without_collection(*arguments: Any, **options: Any) -> Any:
    """Parse with garbage collection disabled. A task's finalizer that logs a traceback also parses, and CPython 3.11
    reports a nested parse as "AST constructor recursion depth mismatch" (gh-106905)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(*arguments, **options)
    finally:
        if was_enabled:
            gc.enable()


ast.parse = _parse_without_collection


def _not_of_an_earlier_loop(record: logging.LogRecord) -> bool:
    """Drop gRPC's events of an earlier event loop. gRPC has one queue for all event loops, and an event for a finished
    test's loop would be an error in the running test's loop."""
    error = record.exc_info[1] if record.exc_info else None
    return not (str(error) == "Event loop is closed" and "PollerCompletionQueue" in record.getMessage())


logging.getLogger("asyncio").addFilter(_not_of_an_earlier_loop)

# Examples have no deadline: a shared machine may stall in any of them, and pytest's timeout catches hangs. Every run
# uses the same examples, so that a change does not fail by an unrelated fault: `make fuzz` searches for new ones.
settings.register_profile("few", max_examples=25, deadline=None, derandomize=True, print_blob=True)  # for make test
settings.register_profile("many", settings.get_profile("few"), max_examples=200)  # for make test-system
settings.register_profile("fuzz", settings.get_profile("few"), max_examples=100, derandomize=False)
settings.load_profile(os.environ.get("ORCHESTRRL_HYPOTHESIS", "few"))


OF_PROCESSES = [Path(__file__).parent / folder for folder in ("system", "faults", "vllm")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", type=int, metavar="SEED", help="run a tenth of the selected tests, drawn with SEED")
    parser.addoption("--record", action="store_true", help="record the calls of clients (tests/clients/recordings)")


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    if any(folder in item.path.parents for folder in OF_PROCESSES):
        item.add_marker("process")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--tenth")
    if seed is not None:
        drawn = set(random.Random(seed).sample(range(len(items)), -(-len(items) // 10)))
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n not in drawn])
        items[:] = [item for n, item in enumerate(items) if n in drawn]


STARTS_A_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_in_process: list[str] = []  # the running test, if it must not start a process


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    # matplotlib calls fc-list for fonts, once per machine
    if event in STARTS_A_PROCESS and _in_process and arguments[:1] != ("fc-list",):
        raise AssertionError(f"{_in_process[0]} starts a process ({arguments[:1]}): it belongs in tests/system")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if item.get_closest_marker("process") is None:
        _in_process.append(item.nodeid)
    try:
        return (yield)
    finally:
        _in_process.clear()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restore the log level after a command that ran in the test's own process and changed it."""
    ours = logging.getLogger("orchestrrl")
    before = ours.level
    yield
    ours.setLevel(before)
