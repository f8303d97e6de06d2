"""Insert small faults into the production code and find which of them the tests detect: `make mutants`.

A mutant changes one comparison, constant, call or branch of a function. The tests to run against it are read from a
recorded run of the suite under coverage, subprocesses included: first the tests that reach the changed line, then the
others in files in which a subprocess reached it, because processes may be shared between tests. A mutant for which no
test fails within `LIMIT_S` has survived, unless the tests hang.

    python tests/mutants.py record -m "not vllm and not slow" -n 3   # once per suite; pytest's arguments
    python tests/mutants.py plant --sample 20                        # resumes after an interruption
    python tests/mutants.py try NAME tests/planner/test_admission.py      # one mutant against these tests
    python tests/mutants.py show

`--tree` selects another checkout, such as one with an older suite: its tests run against its code, while names and
choice of the mutants are the same as far as the changed functions are.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.json")  # names of mutants, each with its reason
SEED = 18
LIMIT_S = 300.0
TEST_LIMIT_S = 30.0  # or ten times the duration of the longest without a mutant
DOMAINS: dict[str, tuple[str, ...]] = {
    "ledger": (
        "orchestrrl/gateway/ledger/ledger.py",
        "orchestrrl/gateway/ledger/store.py",
        "orchestrrl/gateway/ledger/pieces.py",
    ),
    "relay": ("orchestrrl/gateway/relay.py", "orchestrrl/gateway/attempt.py", "orchestrrl/gateway/core.py"),
    "journal": (
        "orchestrrl/core/journal/store.py",
        "orchestrrl/core/journal/damage.py",
        "orchestrrl/core/journal/values.py",
    ),
    "operations": (
        "orchestrrl/core/operation.py",
        "orchestrrl/core/delivery.py",
        "orchestrrl/core/operation_runner.py",
        "orchestrrl/core/operations.py",
        "orchestrrl/core/nodes.py",
    ),
    "redeployment": (
        "orchestrrl/fleet/redeployment/controller.py",
        "orchestrrl/fleet/redeployment/book.py",
        "orchestrrl/fleet/redeployment/run.py",
        "orchestrrl/fleet/redeployment/actions.py",
    ),
    "circuits": (
        "orchestrrl/fabric/circuit_change.py",
        "orchestrrl/fabric/circuit_executor.py",
        "orchestrrl/fabric/stage_commit.py",
        "orchestrrl/fabric/verification.py",
    ),
    "weights": (
        "orchestrrl/weights/controller/controller.py",
        "orchestrrl/weights/controller/run.py",
        "orchestrrl/weights/controller/carrying.py",
        "orchestrrl/weights/controller/installing.py",
    ),
    "plan barrier": ("planner/admission.py",),
    "balancer": ("balancer/*.py",),
    "solver": ("planner/solver/*.py",),
}
PER_DOMAIN = 8

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True)
class Mutant:
    """One change. `name` is stable over edits elsewhere in the file: path, function, kind and its number in the
    function."""

    name: str
    domain: str
    path: str
    line: int
    end_line: int
    before: str
    after: str
    begin: int  # bytes of the file
    end: int


def mutants_of(path: str, domain: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a file, in the order of its text."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def visit(node: ast.AST, function: str, numbers: defaultdict[str, Iterator[int]]) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
            return  # texts, and code that a successful run never reaches
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}" if function else node.name
            if not isinstance(node, ast.ClassDef):
                numbers = defaultdict(count)
            for statement in node.body:
                yield from visit(statement, function, numbers)
            return
        if numbers is not _NOWHERE:
            for kind, target, after in _changes(node):
                begin = starts[target.lineno - 1] + target.col_offset
                end = starts[(target.end_lineno or 0) - 1] + (target.end_col_offset or 0)
                before = source.encode()[begin:end].decode()
                yield Mutant(
                    f"{path}:{function}:{kind}:{next(numbers[kind])}",
                    domain,
                    path,
                    target.lineno,
                    target.end_lineno or target.lineno,
                    before,
                    after or f"not ({before})",
                    begin,
                    end,
                )
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, numbers)

    for statement in ast.parse(source).body:
        yield from visit(statement, "", _NOWHERE)


_NOWHERE: defaultdict[str, Iterator[int]] = defaultdict(count)  # outside any function


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """Yield the changes of one node: kind, replaced source and replacement; without a replacement, its negation."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=comparators):
            opposite = ast.Compare(left, [_OPPOSITE[type(operator)]()], comparators)
            yield "comparison", node, f"({ast.unparse(opposite)})"
        case ast.Constant(value=bool(value)):
            yield "constant", node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, f"({value + 1!r})"
        case ast.Expr(value=ast.Call() as call) | ast.Expr(value=ast.Await(value=ast.Call() as call)):
            if not ast.unparse(call.func).startswith(("logger.", "print")):
                yield "call", node, "pass"
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, ast.Constant):
            if not isinstance(test, ast.Compare):  # the opposite of a comparison is already a change
                yield "branch", test, ""


def chosen(tree: Path, seed: int = SEED) -> list[Mutant]:
    """Return the mutants of every domain, kinds mixed, without those listed as equivalent. A change of the code only
    changes the choice by the mutants that it adds and removes."""
    equivalent = json.loads(EQUIVALENT.read_text()) if EQUIVALENT.exists() else {}
    found: list[Mutant] = []
    for domain, patterns in DOMAINS.items():
        kinds: dict[str, list[Mutant]] = defaultdict(list)
        for path in sorted(path for pattern in patterns for path in tree.glob(pattern)):
            name = str(path.relative_to(tree))
            for mutant in mutants_of(name, domain, path.read_text()):
                if mutant.name not in equivalent:
                    kinds[mutant.name.split(":")[2]].append(mutant)
        for mutants in kinds.values():
            mutants.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.name}".encode()).digest())
        names = sorted(kinds)
        while sum(m.domain == domain for m in found) < PER_DOMAIN and any(kinds.values()):
            for kind in names:
                if kinds[kind] and sum(m.domain == domain for m in found) < PER_DOMAIN:
                    found.append(kinds[kind].pop())
    return found


# --- Recording: which tests reach which lines -------------------------------------------------------------------------

_TEST = "ORCHESTRRL_MUTANTS_TEST"
_TIMES = "ORCHESTRRL_MUTANTS_TIMES"


def pytest_configure(config: pytest.Config) -> None:
    """Report the running test to coverage, in this process and its children. This file, copied, is the plug-in of the
    recorded run."""
    times = Path(os.environ[_TIMES])

    class Recorder:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
            from coverage import Coverage

            measuring = Coverage.current()
            assert measuring is not None, "coverage does not run in this process"
            os.environ[_TEST] = item.nodeid
            measuring.switch_context(item.nodeid)
            begun_s = time.perf_counter()
            try:
                return (yield)
            finally:
                measuring.switch_context("")
                os.environ[_TEST] = ""
                with (times / str(os.getpid())).open("a") as log:
                    log.write(json.dumps([item.nodeid, round(time.perf_counter() - begun_s, 3)]) + "\n")

    config.pluginmanager.register(Recorder())


def record(tree: Path, out: Path, arguments: list[str]) -> None:
    """Run the suite under coverage, its subprocesses included, and store which tests reached which lines."""
    shutil.rmtree(out / "coverage", ignore_errors=True)
    (out / "coverage").mkdir(parents=True)
    times = out / "times"
    shutil.rmtree(times, ignore_errors=True)
    times.mkdir()
    settings = out / "coveragerc"
    files = "\n  ".join(str(tree / pattern) for patterns in DOMAINS.values() for pattern in patterns)
    settings.write_text(
        f"[run]\nparallel = true\nsigterm = true\ndata_file = {out}/coverage/data\n"
        f"context = ${{{_TEST}-}}\ninclude =\n  {files}\n"
    )
    environment = {**_environment(tree), "COVERAGE_PROCESS_START": str(settings), _TIMES: str(times)}
    environment["PYTHONPATH"] += f"{os.pathsep}{out / 'plugin'}"
    (out / "plugin").mkdir(exist_ok=True)
    shutil.copy(__file__, out / "plugin" / "mutants_recorder.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutants_recorder", *arguments]
    print(*command[1:], flush=True)
    subprocess.run(command, cwd=tree, env=environment, check=False)
    print("bringing together what the processes reached", flush=True)
    reached = _reached(tree, out / "coverage")
    durations = {test: took for log in times.iterdir() for test, took in map(json.loads, log.read_text().splitlines())}
    (out / "reached.json").write_text(json.dumps({"reached": reached, "durations_s": durations}))
    shutil.rmtree(out / "coverage")


def _reached(tree: Path, folder: Path) -> dict[str, dict[int, list[list[str]]]]:
    """Return for each file and line the tests whose own process reached it, and those of whose subprocesses one did."""
    from coverage import CoverageData

    found: dict[str, dict[int, list[set[str]]]] = {}
    for file in folder.iterdir():
        data = CoverageData(str(file))
        data.read()
        for path in data.measured_files():
            lines = found.setdefault(str(Path(path).relative_to(tree)), {})
            for line, contexts in data.contexts_by_lineno(path).items():
                own, below = lines.setdefault(line, [set(), set()])
                for context in contexts:
                    outer, _, inner = context.rpartition("|")
                    own.update({inner} if inner else ())
                    below.update({outer} if outer else ())
    return {
        path: {line: [sorted(own), sorted(below - own)] for line, (own, below) in sorted(lines.items())}
        for path, lines in sorted(found.items())
    }


# --- Inserting faults
# --------------------------------------------------------------------------------------------------


def _environment(tree: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COVERAGE_"))}
    return {**kept, "PYTHONPATH": str(tree)}


def tests_for(mutant: Mutant, recorded: dict[str, object]) -> list[str]:
    """Return the tests to run against a mutant, the most likely and shortest first."""
    lines: dict[str, list[list[str]]] = recorded["reached"].get(mutant.path, {})  # type: ignore[attr-defined]
    durations: dict[str, float] = recorded["durations_s"]  # type: ignore[assignment]
    own: set[str] = set()
    below: set[str] = set()
    for line in range(mutant.line, mutant.end_line + 1):
        for tests, kind in zip(lines.get(str(line), ()), (own, below), strict=False):
            kind.update(tests)
    files = {test.partition("::")[0] for test in below}
    beside = {test for test in durations if test.partition("::")[0] in files} - own - below
    return [
        test
        for group in (own, below - own, beside)
        for test in sorted(group & durations.keys(), key=lambda each: (durations[each], each))
    ]


def try_one(tree: Path, out: Path, name: str, tests: list[str]) -> None:
    """Run pytest with these arguments against one mutant."""
    path = name.partition(":")[0]
    found = [mutant for mutant in mutants_of(path, "", (tree / path).read_text()) if mutant.name == name]
    if not found:
        raise SystemExit(f"no such mutant: {name}")
    print(f"line {found[0].line}: {found[0].before}  ->  {found[0].after}")
    copy = _copy(tree, out / f"try{os.getpid()}" / "tree")
    outcome, why = planted(found[0], copy, tests, copy.parent)
    print((copy.parent / "log").read_text(), f"{outcome}: {why}", sep="\n")
    shutil.rmtree(copy.parent)


def planted(
    mutant: Mutant, copy: Path, tests: list[str], scratch: Path, durations_s: Sequence[float] = (LIMIT_S,)
) -> tuple[str, str]:
    """Return the outcome of one mutant in a copy of the tree: `killed` by a test that passes without it, `survived`, or
    `unreached`. Tests that hang count as killed: `durations_s` are their times without the mutant."""
    if not tests:
        return "unreached", ""
    usually_s, test_limit_s = sum(durations_s), max(TEST_LIMIT_S, 10 * max(durations_s))
    path = copy / mutant.path
    sound = path.read_bytes()
    while True:
        _write(path, sound[: mutant.begin] + mutant.after.encode() + sound[mutant.end :])
        try:
            status, failed = _pytest(copy, tests, scratch, test_limit_s)
        finally:
            _write(path, sound)
        if status is None:
            outcome = "killed" if usually_s < LIMIT_S / 5 else "survived"
            return outcome, f"{LIMIT_S:g} s were not enough for {len(tests)} tests, which take {usually_s:.0f} s"
        if status == 0:
            return "survived", f"{len(tests)} tests"
        if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
            return "survived", "the recorded tests are not those of this tree: record them again"
        broken = next((test for test in tests if f"{failed} ".startswith(f"{test} ")), None)
        if broken is None or _pytest(copy, [broken], scratch, test_limit_s)[0] == 0:
            # A run that ends in another way, e.g. by a crash or a failed import, has also detected it.
            return "killed", failed[:200] or f"pytest ended with {status}"
        tests = [test for test in tests if test != broken]
        if not tests:
            return "survived", "its tests fail without it, too"


def _pytest(copy: Path, tests: list[str], scratch: Path, test_limit_s: float) -> tuple[int | None, str]:
    """Return the exit status, or None after `LIMIT_S`, and the first failed test with its output."""
    listing = scratch / "tests.txt"
    listing.write_text("\n".join(tests) + "\n")
    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", f"--timeout={test_limit_s:.0f}"]
    command = [sys.executable, "-m", "pytest", *options, f"@{listing}"]
    with (scratch / "log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=copy, env=_environment(copy), stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            _end_group(process)
        log.seek(0)
        summary = (line.split(" ", 1)[1].strip() for line in log if line.startswith(("FAILED tests", "ERROR tests")))
        return status, next(summary, "")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write(path: Path, text: bytes) -> None:
    path.write_bytes(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()  # its time and size may equal those of the other text


def _copy(tree: Path, to: Path) -> Path:
    """Copy the tracked files and the environments of a checkout."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    names = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, capture_output=True).stdout.decode()
    for name in filter(None, names.split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, to / name)
    for environment in (".venv", ".venv-vllm"):
        if (tree / environment).exists():
            (to / environment).symlink_to((tree / environment).resolve())
    return to


def plant(tree: Path, out: Path, *, seed: int, sample: int, jobs: int, domain: str) -> None:
    """Try the mutants that have no result yet."""
    recorded = json.loads((out / "reached.json").read_text())
    mutants = [mutant for mutant in chosen(tree, seed) if domain in ("", mutant.domain)]
    if sample:
        mutants = random.Random(seed).sample(mutants, min(sample, len(mutants)))
    results = out / "results.jsonl"
    have = {name for name, _, _ in _results(out)}
    left = [mutant for mutant in mutants if mutant.name not in have]
    copies = [_copy(tree, out / f"copy{os.getpid()}-{index}" / "tree") for index in range(jobs)]
    free = list(copies)

    def attempt(mutant: Mutant) -> None:
        copy = free.pop()
        begun_s = time.perf_counter()
        try:
            tests = tests_for(mutant, recorded)
            durations_s = [recorded["durations_s"][test] for test in tests]
            outcome, why = planted(mutant, copy, tests, copy.parent, durations_s)
        finally:
            free.append(copy)
        with results.open("a") as log:
            log.write(json.dumps([mutant.name, outcome, why]) + "\n")
        print(f"{outcome:9} {time.perf_counter() - begun_s:5.0f} s  {mutant.name}: {why}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(attempt, left):
            pass
    for copy in copies:
        shutil.rmtree(copy.parent)
    show(tree, out, seed)


def _results(out: Path) -> list[list[str]]:
    results = out / "results.jsonl"
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def show(tree: Path, out: Path, seed: int) -> None:
    """Print how many mutants of each domain were killed, and those that were not, with their change."""
    outcome = {name: (what, why) for name, what, why in _results(out)}
    mutants = [mutant for mutant in chosen(tree, seed) if mutant.name in outcome]
    killed = Counter(mutant.domain for mutant in mutants if outcome[mutant.name][0] == "killed")
    tried = Counter(mutant.domain for mutant in mutants)
    for mutant in mutants:
        what, why = outcome[mutant.name]
        if what != "killed":
            print(f"{what} ({why or 'no test reaches it'}): {mutant.name}, line {mutant.line}")
            print(f"    {mutant.before}  ->  {mutant.after}")
    for domain in tried:
        print(f"{domain:14} {killed[domain]:3} of {tried[domain]}")
    if tried:
        print(f"{'all':14} {killed.total():3} of {tried.total()} killed, {killed.total() / tried.total():.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "plant", "try", "show"))
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout, its tests included")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "mutants", help="where results are kept")
    parser.add_argument("--seed", type=int, default=SEED, help="for another choice of mutants")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="try only so many")
    parser.add_argument("--domain", default="", choices=DOMAINS, help="try only mutants of this domain")
    parser.add_argument("--jobs", type=int, default=2)
    options, arguments = parser.parse_known_args()
    tree, out = options.tree.resolve(), options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.what == "record":
        record(tree, out, arguments)
    elif options.what == "try" and arguments:
        try_one(tree, out, arguments[0], arguments[1:])
    elif arguments:
        parser.error(f"unknown: {' '.join(arguments)}")
    elif options.what == "plant":
        plant(tree, out, seed=options.seed, sample=options.sample, jobs=options.jobs, domain=options.domain)
    else:
        show(tree, out, options.seed)


if __name__ == "__main__":
    main()
