"""Every state of a redeployment can be rendered, and the rendered steps are complete."""

import io
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from orchestrrl.cli.fleet import redeploy_text as words
from orchestrrl.core.operation import OperationState, StepDirection, StepState
from orchestrrl.fleet.redeployment.steps import (
    StepKind,
)
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.plain_values import plain

NAMES = st.sampled_from(["", "e0", "e1", "s17-2.0", "s17-2.3", "[red]x[/red]", "a b", "07"])
SECONDS = st.floats(0.0, 1e5)
WORDS = st.sampled_from(["", "ok", "[/x] broke", "two\nlines", "e0: is not e1", "y" * 900, words.CUT_SHORT])
STARTED = {StepState.RUNNING, StepState.DONE, StepState.FAILED}


@st.composite
def steps(draw: st.DrawFn) -> pb.RedeployStep:
    state = draw(st.sampled_from(StepState))
    step = pb.RedeployStep(
        number=draw(st.integers(1, 30)),
        stage=draw(st.integers(1, 6)),
        kind=draw(st.sampled_from(StepKind)),
        engine_id=draw(NAMES),
        direction=draw(st.sampled_from(StepDirection)),
        state=state,
        detail=draw(WORDS),
        within_s=draw(SECONDS),
    )
    if state in STARTED:
        step.began_unix_s = 1e9 + draw(SECONDS)
        if state is not StepState.RUNNING and draw(st.booleans()):
            step.elapsed_s = draw(SECONDS)
    return step


ENGINES = st.lists(
    st.builds(
        pb.RedeployEngine,
        engine_id=NAMES,
        configuration=st.sampled_from(["tp2", "[tp8]", ""]),
        gpus=st.lists(st.integers(0, 63), max_size=8),
    ),
    max_size=40,
)
REPORTS = st.builds(
    pb.RedeploymentReport,
    redeployment_id=NAMES,
    plan_id=NAMES,
    reason=WORDS,
    created_unix_s=st.just(1e9),
    state=st.sampled_from(["planned", *OperationState, "of a later version"]),
    old_engines=ENGINES,
    new_engines=ENGINES,
    engine_ids=st.lists(NAMES, max_size=3),
    steps=st.lists(steps(), max_size=70),
    detail=WORDS,
    ended_unix_s=st.none() | st.floats(1e9, 1.001e9),
    requests_moved=st.integers(0, 10),
    requests_parked=st.integers(0, 10),
    closed_s=st.none() | SECONDS,
).map(plain)


def printed(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=300)
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


@given(REPORTS, st.none() | REPORTS)
def test_every_report_is_rendered(report: dict[str, Any], before: dict[str, Any] | None) -> None:
    now_s = 1e9 + 5.0
    printed(words.begun(report), *words.outcome(report), words.progress(report), *words.redeployment_summary(report))
    printed(words.picture(report), words.time_line(report, now_s), *words.news(before, report))
    lines = list(words.news(before, report))
    assert all("\n" not in line for line in lines[1:])
    printed(words.engines_table(report), words.plan_table(report), words.taken_table(report))


@given(REPORTS)
def test_every_step_is_shown_exactly_once(report: dict[str, Any]) -> None:
    groups = words.together(report)
    assert sum(len(group.steps) for group in groups) == len(report["steps"])
    for group in groups:
        states = {step["state"] for step in group.steps}
        assert (group.state == "done") == (states == {"done"})
        assert (group.state == "failed") == ("failed" in states)


@given(REPORTS)
def test_unchanged_report_has_no_news(report: dict[str, Any]) -> None:
    assert list(words.news(report, report)) == []


def test_engine_lists_are_short() -> None:
    def named(*ids: str) -> str:
        step = {"number": 1, "stage": 1, "kind": "stop", "direction": "forward", "state": "done", "within_s": 1.0}
        shown = {**step, "detail": "", "began_unix_s": None, "elapsed_s": None}
        report = {"state": "running", "steps": [{**shown, "engine_id": id} for id in ids]}
        return str(next(iter(words.plan_table(report).columns[2].cells)))

    assert named("e0", "e1") == "e0, e1"
    assert named(*(f"e{n}" for n in (0, 1, 2, 7))) == "e0-2, 7"
    assert named(*(f"s1-2.{n}" for n in range(1000))) == "s1-2.0-999"
    assert named("a", "b", "c", "d", "e", "f") == "a, b, c and 3 more"
    assert named("e00", "e01", "e02") == "e00, e01, e02", "a range would lose the leading zeros"
    assert named("") == "the fleet"


def test_rows_of_a_large_fleet_are_limited() -> None:
    engines = [{"engine_id": f"e{n}", "configuration": f"tp{n % 2 + 1}", "gpus": [n]} for n in range(1000)]
    table = words.engines_table({"old_engines": engines, "new_engines": engines[500:]})
    fates, configurations = (map(str, table.columns[column].cells) for column in (1, 2))
    assert list(zip(fates, configurations, strict=True)) == [
        ("stops", "tp1"),
        ("stops", "tp2"),
        ("stays", "tp1"),
        ("stays", "tp2"),
    ]
