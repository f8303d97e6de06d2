"""`orchestrrl fabric slack` and its trace files."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter
from typer.testing import CliRunner, Result

from orchestrrl.cli import output
from orchestrrl.cli.fabric.slack import POSITIONS_SHOWN
from orchestrrl.cli.main import application
from orchestrrl.core.errors import ProblemFaults
from orchestrrl.fabric.traces import (
    MOST_FAULTS,
    TracedCollective,
    TracedIteration,
    TracedMark,
    TraceEvent,
    by_rank,
    common,
    read_trace,
    study,
    write_trace,
)
from planner.fabric.slack_summary import SlackSummary
from tests.planner.fabric.slack_iterations import LAYERS, events

SKEW_S = 0.001


def recorded(rank: int, iterations: int = 25, *, marked: bool = True) -> list[TraceEvent]:
    """Build a trace with the same iterations on every rank, each rank slightly later than the previous one."""
    found: list[TraceEvent] = []
    began_s, late_s = 0.0, SKEW_S * rank
    for event in events("jitter", 1, iterations):
        if event.kind == "iteration" and marked:
            found.append(TracedIteration(rank=rank, iteration=event.number, at_s=event.at_s + late_s))
        elif event.kind == "mark":
            found.append(TracedMark(rank=rank, mark=event.text, at_s=event.at_s + late_s))
        elif event.kind == "started":
            began_s = event.at_s
        elif event.signature is not None:
            found.append(
                TracedCollective(
                    rank=rank,
                    op=event.signature.op,
                    group=event.signature.group,
                    bytes=event.signature.size,
                    start_s=began_s + late_s,
                    end_s=event.at_s + late_s,
                    asynchronous=False,
                )
            )
    return found


def traces(folder: Path, ranks: int, **kwargs: bool) -> list[str]:
    paths = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        write_trace(recorded(rank, **kwargs), path)  # type: ignore[arg-type]
    return [str(path) for path in paths]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(application(), ["fabric", "slack", *arguments])


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "found"])
def test_slack_shows_windows_and_switches(tmp_path: Path, marked: bool) -> None:
    result = run(*traces(tmp_path, 2, marked=marked))
    assert (result.exit_code, result.stderr) == (0, "")
    words = " ".join(result.stdout.split())
    for expected in (
        "Slack before each operation, 2 ranks",
        "all_to_all",
        f"iterations of {4 * LAYERS + 2} collectives",
        "optimizer",
        "piezo_polatis",
        "Quiet on all 2 ranks together",
        "robotic_telescent 2 min 00 s 0 50 ",
    ):
        assert expected in words


def test_each_window_fits_on_one_terminal_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.stdout(), "_width", 100)
    shown = run(*traces(tmp_path, 1)).stdout.partition("Windows of an iteration")[2]
    rows = re.findall(r"^ (\d+) (\w+) .* \d\.\d% *$", shown, flags=re.MULTILINE)
    assert [int(position) for position, _ in rows] == sorted(int(position) for position, _ in rows)
    assert len(rows) == POSITIONS_SHOWN
    assert {"all_gather", "all_to_all"} <= {operation for _, operation in rows}


def test_slack_as_json(tmp_path: Path) -> None:
    result = run(*traces(tmp_path, 2), "--json", "--risk", "0.1")
    assert (result.exit_code, result.stderr) == (0, "")
    body = json.loads(result.stdout)
    summaries = TypeAdapter(list[SlackSummary]).validate_python(body["ranks"])
    assert [summary.ranks for summary in summaries] == [(0,), (1,)]
    assert json.loads(json.dumps(list(map(asdict, summaries)))) == body["ranks"]
    assert summaries[0].q == 0.1
    assert len(summaries[0].positions) == 4 * LAYERS + 2
    assert body["common"]["ranks"] == 2
    assert body["common"]["covering"]["liquid_crystal_coherent"] == 25
    assert body["common"]["covering"]["robotic_telescent"] == 0


def test_lagging_ranks_shorten_the_common_windows() -> None:
    one, two = ([event for event in recorded(rank) if isinstance(event, TracedCollective)] for rank in (0, 1))
    alone, both = common([one]), common([one, two])
    assert len(alone.lengths_s) == len(both.lengths_s)
    for own_s, shared_s in zip(alone.lengths_s, both.lengths_s, strict=True):
        assert shared_s == pytest.approx(own_s - SKEW_S)
    assert both.share < alone.share


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_draws_the_distributions(tmp_path: Path, suffix: str) -> None:
    picture = tmp_path / f"slack.{suffix}"
    result = run(*traces(tmp_path, 1), "--plot", str(picture))
    assert (result.exit_code, result.stderr) == (0, "")
    assert picture.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_unwritable_plot_is_reported(tmp_path: Path) -> None:
    result = run(*traces(tmp_path, 1), "--plot", str(tmp_path / "nowhere" / "slack.png"))
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_all_errors_are_reported_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(
        '{"rank": -1, "op": "all_reduce", "group": 0, "bytes": 8, "start_s": 1.0, "end_s": 2.0}\n'
        "\n"
        "not json\n"
        "[1]\n"
        '{"rank": 0, "op": "all_reduce", "group": 0, "bytes": 8, "start_s": 2.0, "end_s": 1.0}\n'
        '{"rank": 0, "mark": "backward", "at_s": NaN}\n'
        '{"rank": 0, "iteration": 1, "at_s": 1.0, "name": "x"}\n'
    )
    result = run(str(path), str(tmp_path / "missing.jsonl"))
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert [line.removeprefix(f"{path}:").split(":")[0] for line in lines[:-1]] == ["1", "3", "4", "5", "6", "7"]
    for expected in (
        "rank: must be >= 0, got -1",
        "end_s: must be >= start_s",
        "at_s: must be a finite number, got nan",
    ):
        assert expected in result.stderr
    assert "missing.jsonl: cannot be read" in lines[-1]


def test_options_are_checked_before_traces() -> None:
    result = run("nowhere.jsonl", "--risk", "1.5", "--plot", "slack.bmp")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "--risk: must be > 0 and < 1, got 1.5",
        "--plot: must end in .png, .svg, .pdf, got 'slack.bmp'",
    ]


def test_trace_with_only_marks_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "marks.jsonl"
    write_trace([TracedMark(rank=0, mark="forward", at_s=1.0)], path)
    result = run(str(path))
    assert result.exit_code == 2
    assert "must have at least one collective, got 1 other events" in result.stderr


def test_number_of_printed_errors_is_limited(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("x\n" * 1000)
    with pytest.raises(ProblemFaults) as caught:
        read_trace(path)
    assert len(caught.value.faults) == MOST_FAULTS + 1
    assert "1000 lines" in caught.value.faults[-1]


def test_rank_with_one_collective_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    write_trace(
        [TracedCollective(rank=0, op="barrier", group=0, bytes=0, start_s=1.0, end_s=1.0, asynchronous=False)], path
    )
    result = run(str(path))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "no repetition in" in result.stdout


TIMES = st.floats(-1e9, 1e9)
EVENTS = st.one_of(
    st.builds(
        lambda rank, op, group, size, start_s, length_s, flag: TracedCollective(
            rank=rank, op=op, group=group, bytes=size, start_s=start_s, end_s=start_s + length_s, asynchronous=flag
        ),
        st.integers(0, 7),
        st.text(min_size=1, max_size=9),
        st.integers(),
        st.integers(0, 2**62),
        TIMES,
        st.floats(0, 1e6),
        st.booleans(),
    ),
    st.builds(
        lambda rank, mark, at_s: TracedMark(rank=rank, mark=mark, at_s=at_s), st.integers(0, 7), st.text(), TIMES
    ),
    st.builds(
        lambda rank, number, at_s: TracedIteration(rank=rank, iteration=number, at_s=at_s),
        st.integers(0, 7),
        st.integers(),
        TIMES,
    ),
)


@given(st.lists(EVENTS, max_size=20))
def test_written_trace_can_be_read(tmp_path_factory: pytest.TempPathFactory, printed: list[TraceEvent]) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    write_trace(printed, path)
    assert read_trace(path) == printed
    ranks = by_rank(printed)
    assert list(ranks) == sorted({event.rank for event in printed})
    if any(isinstance(event, TracedCollective) for event in printed):
        summaries, quiet = study(printed, 0.05)
        assert sum(histogram.total for each in summaries for histogram in each.histograms.values()) < len(printed)
        assert quiet.ranks == len(summaries)
