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

# Its assertions are shown as those of tests are.
pytest.register_assert_rewrite("orchestrrl.fleet.deployers.conformance")

# As in `orchestrrl` itself, also for tests that load numpy without it.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Tests interrupt processes that they start. Those of a process that ignores it, as one does that a shell has started in
# the background, would ignore it, too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

fork_server.install()

_parse = ast.parse


def _parse_without_collection(*arguments: Any, **options: Any) -> Any:
    """Parse while nothing is collected. A task's finalizer that logs a traceback parses too, and CPython 3.11 takes a
    parse within a parse for "AST constructor recursion depth mismatch" (gh-106905)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _parse(*arguments, **options)
    finally:
        if was_enabled:
            gc.enable()


ast.parse = _parse_without_collection


def _not_of_an_earlier_loop(record: logging.LogRecord) -> bool:
    """gRPC has one queue of events for all event loops. One that comes for the loop of a test that is over is an error
    in the loop of the test that runs."""
    error = record.exc_info[1] if record.exc_info else None
    return not (str(error) == "Event loop is closed" and "PollerCompletionQueue" in record.getMessage())


logging.getLogger("asyncio").addFilter(_not_of_an_earlier_loop)

# No deadline for an example: a shared machine may stall in any, and pytest's time-out catches what hangs. The same
# examples in every run, so that a change does not fail by a fault that it did not make: `make fuzz` searches.
settings.register_profile("few", max_examples=25, deadline=None, derandomize=True, print_blob=True)  # make test
settings.register_profile("many", settings.get_profile("few"), max_examples=200)  # make test-system
settings.register_profile("fuzz", settings.get_profile("few"), max_examples=100, derandomize=False)
settings.load_profile(os.environ.get("ORCHESTRRL_HYPOTHESIS", "few"))


OF_PROCESSES = [Path(__file__).parent / folder for folder in ("system", "faults", "vllm")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tenth", type=int, metavar="SEED", help="run a tenth of the selected tests, drawn with SEED")


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
_in_process: list[str] = []  # the test that runs, where it may start no process


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    # matplotlib asks fc-list for fonts, once on a machine.
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
    """A command that is run in a test's own process may turn our log down: not for the tests after it."""
    ours = logging.getLogger("orchestrrl")
    before = ours.level
    yield
    ours.setLevel(before)
