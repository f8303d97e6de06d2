"""Every command that calls the daemon, through Typer's runner and real gRPC, against fixed responses."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import PLAN, FakeDaemon, Serving
from typer.testing import CliRunner, Result

from orchestrrl.cli.command import DAEMON_VARIABLE
from orchestrrl.cli.main import application
from orchestrrl.cli.plan.explain import alternatives_table, headline, predictions
from orchestrrl.rpc.pb import control_pb2 as pb
from orchestrrl.rpc.plain_values import plain


@pytest.fixture(scope="module")
def served() -> Iterator[FakeDaemon]:
    with Serving(FakeDaemon()) as daemon:
        yield daemon


@pytest.fixture
def daemon(served: FakeDaemon) -> FakeDaemon:
    served.received.clear()
    served.empty = False
    return served


def run(daemon: FakeDaemon | str, *arguments: str) -> Result:
    address = daemon if isinstance(daemon, str) else daemon.address
    return CliRunner().invoke(application(), [*arguments], env={DAEMON_VARIABLE: address})


def output_text(result: Result) -> str:
    """Return the standard output of a successful command, with spaces collapsed because column widths vary."""
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


READING = [
    ["status"],
    ["workers"],
    ["requests"],
    ["mode"],
    ["moves"],
    ["plan", "explain"],
    ["plan", "list"],
    ["top", "--once"],
]


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_read_commands_print_one_json_object(daemon: FakeDaemon, command: list[str]) -> None:
    result = run(daemon, *command, "--json")
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(result.stdout), dict)
    assert result.stderr == ""


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_commands_on_a_daemon_that_just_started(daemon: FakeDaemon, command: list[str]) -> None:
    daemon.empty = True
    result = run(daemon, *command)
    if command in (["moves"], ["plan", "explain"]):
        assert (result.exit_code, result.stdout) == (1, "")
        assert "yet" in result.stderr
    else:
        assert result.exit_code == 0, result.output


def test_status(daemon: FakeDaemon) -> None:
    text = output_text(run(daemon, "status"))
    assert "OrchestrRL 0.1.0, mode advise, generation 3, up 2 h 03 min" in text
    assert "12 running, 3 waiting, 4,567 finished" in text
    assert "8 done, 1 failed, 90,000 tokens recomputed, 70,000 moved as KV" in text
    assert "failovers: 12 requests continued after their engine failed, 9 of them recomputed (34,567 tokens)" in text
    assert "e1 is gone: connection refused [Errno 111]" in text
    assert "planner pinned (benchmark)" in text
    assert "e0 ok 12 3 48 75 % 10,000 1,234 tok/s 0.00125 210 ms ago configured tp2" in text
    assert "e1 gone 0 0 - - - - - never - -" in text
    assert "policy: load_index: no step times for e1: [its GPU] is not known" in text
    assert "agent-e0 agent yes 100 ms ago" in text


def test_json_has_plain_strings_numbers_and_nulls(daemon: FakeDaemon) -> None:
    seen: dict[str, Any] = json.loads(run(daemon, "status", "--json").stdout)
    assert (seen["mode"], seen["generation"], seen["plan_control"]["state"]) == ("advise", 3, "pinned")
    assert seen["balance_policy"] == "load_index"
    e0, e1 = seen["workers"]
    assert (e0["step_times_source"], e0["step_times_detail"]) == ("configured", "configured: tp2")
    assert e1["step_times_source"] == ""
    assert (e0["health"], e0["load_index"], e0["kv_free_tokens"]) == ("ok", 0.00125, 2500)
    assert e0["capabilities"]["max_model_len_tokens"] == 4096
    assert e0["capabilities"]["max_sequences"] is None
    assert (e1["health"], e1["load_index"], e1["age_s"], e1["capabilities"]) == ("gone", None, None, None)


def test_workers(daemon: FakeDaemon) -> None:
    text = output_text(run(daemon, "workers"))
    assert "e0 vllm 0.32.0 tiny 4,096 0 http://127.0.0.1:8000 configured: tp2" in text
    assert "e1 not queried yet" in text
    assert "no agent has reported what the engine serves" in text


def test_requests(daemon: FakeDaemon) -> None:
    text = output_text(run(daemon, "requests", "--on-engine", "e0", "--limit", "2"))
    assert "Requests: 2 of 7" in text
    assert "r1 e0 running 100 2,345 4,096 0 12.5 s yes" in text
    assert "r2 gateway waiting 100 0 - 0 0 ms a grammar guides it" in text
    assert daemon.received == [pb.ListRequestsRequest(engine_id="e0", limit=2)]


def test_mode_is_shown_and_set(daemon: FakeDaemon) -> None:
    assert output_text(run(daemon, "mode")) == "mode advise"
    assert daemon.received == []
    assert output_text(run(daemon, "mode", "act", "--reason", "ready")) == "mode act, was advise"
    assert daemon.received == [pb.SetModeRequest(mode=pb.MODE_ACT, reason="ready")]
    assert json.loads(run(daemon, "mode", "advise", "--json").stdout) == {"mode": "advise", "previous": "advise"}
    assert run(daemon, "mode", "sometimes").exit_code == 2


def test_move(daemon: FakeDaemon) -> None:
    assert output_text(run(daemon, "move", "r1", "--to", "e1")) == "r1 continues on e1"
    assert daemon.received == [pb.MoveRequestRequest(request_id="r1", to_engine_id="e1")]
    declined = run(daemon, "move", "r2", "--to", "e1")
    assert (declined.exit_code, declined.stdout) == (1, "")
    assert declined.stderr == "r2 not moved: a grammar guides it\n"
    as_json = run(daemon, "move", "r2", "--to", "e1", "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["done"]) == (1, False)
    unknown = run(daemon, "move", "r3", "--to", "e1")
    assert (unknown.exit_code, unknown.stderr) == (1, "no request 'r3'\n")


def test_moves(daemon: FakeDaemon) -> None:
    text = output_text(run(daemon, "moves"))
    assert "e0 0.006 0.003 e1 stalled stalled" in text
    assert "r7 e0 e1 waiting" in text
    assert "rebalance: load indices differ by 0.006" in text
    assert "1 moves, stopped because within_theta" in text
    assert "recompute, not transfer" in text
    assert "250 ms" in text
    assert "12,000" in text


def test_plan_explain_of_one_plan(daemon: FakeDaemon) -> None:
    text = output_text(run(daemon, "plan", "explain"))
    assert text.startswith("plan-3: keep, not acted on why: gain 4.0 s is within epsilon 10 s (gain_too_small)")
    assert "planner: pinned for 9 min 50 s more (benchmark)" in text
    shown = json.loads(run(daemon, "plan", "explain", "plan-3", "--json").stdout)
    assert (shown["plan_id"], shown["control"]["state"]) == ("plan-3", "pinned")
    missing = run(daemon, "plan", "explain", "plan-9")
    assert (missing.exit_code, missing.stderr) == (1, "no plan 'plan-9'\n")


def test_plan_explain_of_the_latest_plan_that_was_carried_out(daemon: FakeDaemon) -> None:
    missing = run(daemon, "plan", "explain", "--acted")
    assert (missing.exit_code, missing.stderr) == (
        1,
        "no stored plan has been carried out completely; run `orchestrrl redeploy --watch` to follow a redeployment\n",
    )
    daemon.plans += [
        pb.Plan(plan_id="plan-2", decision="reconfigure", acted=True),
        pb.Plan(plan_id="plan-1", acted=True),
    ]
    assert output_text(run(daemon, "plan", "explain", "--acted")).startswith("plan-2: reconfigure, acted on")
    both = run(daemon, "plan", "explain", "plan-3", "--acted")
    assert (both.exit_code, both.stderr) == (2, "--acted: cannot be combined with PLAN, got 'plan-3'\n")


def test_announcement_without_a_report_has_an_unknown_outcome(daemon: FakeDaemon) -> None:
    ended = run(daemon, "fabric", "announce", "gradients")
    assert ended.exit_code == 1
    assert ended.stderr.startswith(f"the daemon at {daemon.address} closed the call without a response (the outcome")


def test_plan_explain_without_proposal_prints_no_bound() -> None:
    nothing = pb.Plan(
        plan_id="plan-4", decision="keep", reason_code="no_step_times", reason="no step times for e0: why"
    )
    printed = plain(nothing)
    text = "\n".join([*headline(printed, 0.0), *predictions(printed)])
    assert "why: no step times for e0: why (no_step_times)" in text
    assert "deployed: unknown or mixed, predicted -; no proposal" in text
    assert "no fleet can end before" not in text
    assert "infeasible" not in text
    assert "0.00 s" not in text


def test_plan_without_a_feasible_alternative_lists_the_reasons() -> None:
    only = pb.Alternative(configuration="tp16", infeasible_because="an instance takes 16 GPUs")
    shown = alternatives_table(plain(pb.Plan(plan_id="plan-5", alternatives=[only])))
    assert str(next(iter(shown.columns[-1].cells))) == "infeasible: an instance takes 16 GPUs"


def test_plan_explain(daemon: FakeDaemon) -> None:
    result = run(daemon, "plan", "explain")
    text = output_text(result)
    assert "inputs: at most 300 ms old; 120 requests running, 40 waiting; forecast: empirical, 8 samples" in text
    assert "forgone: pinned by the operator (pinned)" in text
    assert "note: x runs an unknown configuration" in text
    assert "10.0 s ago" in text or "10 s ago" in text
    assert "tp4 spread 2 reconfigure 423.50 s 500 ms 2 s 426.00 s - -4.00 s" in text
    assert "mixed (2 x tp2, 1 x tp4) 3 reconfigure 420.00 s 4.5 s 2 s 426.50 s 401.0-452.0 s -3.50 s" in text
    assert "as it stands 4 keep 430.00 s 0 ms 0 ms 430.00 s - +0.00 s ████████████████ deployed" in text
    assert "tp1 spread - - - - - - - - - infeasible: a request of 9000 tokens does not fit" in text
    order = [text.index(name) for name in ("tp4 spread 2", "mixed (", "as it stands 4", "tp1 spread -")]
    assert order == sorted(order), "fastest first, infeasible last"
    assert order[0] < text.index("proposed, fastest") < order[1]
    assert "tp4 e9 kept 70 400.00 s 0 ms 0 ms 400.00 s 4-7" in text
    assert "tp4 plan-3.0 new 90 423.50 s 0 ms 2 s 425.50 s 0-3" in text
    assert (
        "lower bound for any fleet, if all lengths were known: 400.00 s; the fastest alternative takes 6 % more" in text
    )
    assert "predicted decoding times are the profiles' times 1.25" in text
    assert "predicted vs. actual: 430.00 s, 441.00 s (+2.6 %)" in text
    assert "predictions: mean error 8 % over 7 steps, 3 % too long on average" in text
    bars = {line.split()[0]: line for line in result.stdout.splitlines() if "█" in line}
    assert bars["512-1,024"].count("█") == 40
    assert bars["0-512"].count("█") == 10
    assert bars["1,536-2,048"].endswith(" 2")


def test_plan_list(daemon: FakeDaemon) -> None:
    assert "keep gain_too_small tp2 tp4 430.00 s 426.00 s 441.00 s no" in output_text(
        run(daemon, "plan", "list", "--limit", "3")
    )
    assert daemon.received == [pb.ListPlansRequest(limit=3)]


def test_plan_override_pin_release(daemon: FakeDaemon) -> None:
    text = output_text(run(daemon, "plan", "override", "tp4", "--reason", "long tail", "--ttl-s", "60"))
    assert text == "planner: overridden to tp4 until released (long tail)"
    assert output_text(run(daemon, "plan", "pin", "--reason", "why not")).startswith("planner: pinned")
    assert output_text(run(daemon, "plan", "release")) == "planner: free"
    assert daemon.received == [
        pb.OverridePlanRequest(configuration="tp4", reason="long tail", ttl_s=60),
        pb.PinPlanRequest(reason="why not"),
        pb.ReleasePlanRequest(),
    ]
    assert json.loads(run(daemon, "plan", "pin", "--json").stdout)["expires_unix_s"] == 1_000_600.0


def test_malformed_input_exits_2_with_all_errors(daemon: FakeDaemon) -> None:
    wrong = run(daemon, "plan", "override", "tp3")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.splitlines() == [
        "configuration: is not one of tp2, tp4, got 'tp3'",
        "reason: must not be empty",
    ]
    negative = run(daemon, "plan", "pin", "--ttl-s", "-1")
    assert (negative.exit_code, negative.stderr) == (2, "--ttl-s: must be >= 0 (0: until released), got -1\n")
    address = run("nowhere", "status")
    assert (address.exit_code, address.stdout) == (2, "")
    assert address.stderr.startswith("--daemon: must be HOST:PORT")


@pytest.mark.parametrize(
    "command",
    [
        ["mode", "act", "--reason", "\udcff"],
        ["requests", "--on-engine", "\udcff"],
        ["plan", "pin", "--reason", "\udcff"],
    ],
)
def test_argument_that_is_not_utf8_exits_2(daemon: FakeDaemon, command: list[str]) -> None:
    refused = run(daemon, *command)
    assert (refused.exit_code, refused.stderr) == (2, "must be UTF-8 text, got '\\udcff'\n")
    assert not daemon.received


def test_journal(daemon: FakeDaemon) -> None:
    lines = run(daemon, "journal", "--limit", "2", "--kind", "mode", "--kind", "operation.result", "--json").stdout
    entries = [json.loads(line) for line in lines.splitlines()]
    assert [(entry["kind"], entry["body"]) for entry in entries] == [
        ("mode", {"reason": "go"}),
        ("operation.result", {"done": True}),
    ]
    assert daemon.received == [pb.WatchJournalRequest(tail=2, kinds=["mode", "operation.result"])]
    text = output_text(run(daemon, "journal", "--follow"))
    assert 'g3 mode act reason="go"' in text
    assert run(daemon, "journal", "--kind", "gossip").exit_code == 2


def test_top_prints_once_into_a_pipe(daemon: FakeDaemon) -> None:
    for arguments in (["top"], ["top", "--once"]):
        text = output_text(run(daemon, *arguments))
        assert "75 %" in text
        assert "r7: e0 -> e1 (waiting)" in text
        assert "plan-3: keep" in text
        assert "planner: pinned for 9 min 50 s more" in text
    daemon.empty = True
    assert "plan: none yet" in output_text(run(daemon, "top", "--once"))


def test_unreachable_daemon_is_reported_with_advice() -> None:
    result = run("127.0.0.1:1", "status")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no daemon at 127.0.0.1:1: start one with `orchestrrl up` or `orchestrrl daemon`" in result.stderr
    followed = run("127.0.0.1:1", "journal", "--follow")
    assert (followed.exit_code, followed.stdout) == (1, "")


def test_unknown_outcome_is_reported_with_advice(daemon: FakeDaemon) -> None:
    result = run(daemon, "move", "late", "--to", "e1")
    assert result.exit_code == 1
    assert "check the state before you retry" in result.stderr


def test_flag_takes_precedence_over_environment(daemon: FakeDaemon) -> None:
    result = CliRunner().invoke(
        application(), ["mode", "--daemon", daemon.address], env={DAEMON_VARIABLE: "127.0.0.1:1"}
    )
    assert output_text(result) == "mode advise"


def test_unix_socket(tmp_path: Path) -> None:
    path = os.path.relpath(tmp_path / "d.sock")  # absolute paths can be too long for a socket
    with Serving(FakeDaemon(), f"unix:{path}") as daemon:
        assert json.loads(run(daemon, "plan", "explain", "--json").stdout)["plan_id"] == PLAN.plan_id
