"""Measured deployments are read correctly, and all faults of a file are reported."""

from pathlib import Path

import pytest
from silicon_rows import csv_of

from orchestrrl.core.errors import ProblemFaults
from orchestrrl.engines.profiles.silicon import COLUMNS, parse_silicon, read_silicon
from planner.cost.profile import Parallelism
from planner.cost.roofline import ClosedLoop, Precision


def test_row_becomes_a_deployment() -> None:
    (row,) = parse_silicon(csv_of({})).deployments
    assert (row.row, row.model.name, row.gpu.name, row.backend) == (1, "qwen3-32b", "h100", "trtllm")
    assert row.parallelism == Parallelism(tp=2)
    assert row.load == ClosedLoop(16, 1024, 256)
    assert row.precision == Precision(16.0, 16.0, 16.0)
    assert row.tpot_s == 0.0125


@pytest.mark.parametrize(
    ("given", "precision"),
    [
        ({"gemm_quant_mode": "fp8"}, Precision(8.0, 8.0, 8.0)),  # static scales, including those of the KV cache
        ({"gemm_quant_mode": "fp8_block"}, Precision(8.0, 8.0, 16.0)),
        ({"precision": "fp8", "backend": "vllm"}, Precision(8.0, 8.0, 16.0)),
        ({"precision": "FP8", "backend": "vllm"}, Precision(8.0, 8.0, 16.0)),
        ({"precision": "bf16"}, Precision(16.0, 16.0, 16.0)),
        ({"model_path": "Qwen/Qwen3-32B-FP8"}, Precision(8.0, 8.0, 16.0)),  # the checkpoint's own
        ({"model_path": "openai/gpt-oss-120b", "precision": "fp4"}, Precision(16.0, 4.25, 16.0)),
    ],
)
def test_precision_comes_from_the_row_or_the_checkpoint(given: dict[str, str], precision: Precision) -> None:
    assert parse_silicon(csv_of(given)).deployments[0].precision == precision


def test_experts_are_split_as_given() -> None:
    given = {"model_path": "Qwen/Qwen3-235B-A22B-FP8", "tp_size": "8", "moe_ep_size": "8", "moe_tp_size": "1"}
    assert parse_silicon(csv_of(given)).deployments[0].parallelism == Parallelism(tp=8, ep=8)
    assert parse_silicon(csv_of({"moe_ep_size": "8"})).deployments[0].parallelism == Parallelism(tp=2)  # dense


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"pp_size": "2"}, "pipeline parallelism is not supported: pp_size must be 1, got 2"),
        ({"model_path": "made/up-7b"}, "unknown model 'made/up-7b'; known models: "),
        ({"system": "tpu_v5"}, "unknown GPU 'tpu_v5'; known GPUs: "),
        ({"backend": "tgi"}, "unknown backend 'tgi'; known backends: trtllm, vllm, sglang"),
        ({"precision": "int3"}, "the quantisation must be one of "),
        ({"osl": "", "silicon_tpot_ms": " "}, "the row has no value for osl, silicon_tpot_ms"),
    ],
)
def test_unsupported_row_is_unpredicted_with_a_reason(given: dict[str, str], reason: str) -> None:
    silicon = parse_silicon(csv_of({}, given))
    assert [row.row for row in silicon.deployments] == [1]
    (left_out,) = silicon.unpredicted
    assert left_out.row == 2
    assert left_out.reason.startswith(reason)


def test_every_fault_names_its_row_and_column() -> None:
    with pytest.raises(ProblemFaults) as caught:
        parse_silicon(
            csv_of(
                {"isl": "many", "batch_size": "0"},
                {},
                {"tp_size": "2.5", "silicon_tpot_ms": "-1", "moe_ep_size": "-1", "osl": "inf"},
            )
        )
    assert caught.value.faults == [
        "row[1].isl: should be a number, got 'many'",
        "row[1].batch_size: must be >= 1, got '0'",
        "row[3].osl: should be a finite number, got 'inf'",
        "row[3].tp_size: should be a whole number, got '2.5'",
        "row[3].moe_ep_size: must be >= 0, got '-1'",
        "row[3].silicon_tpot_ms: must be > 0, got '-1'",
    ]


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", [f"header.{column}: is missing, got ''" for column in COLUMNS]),
        (csv_of(), ["(document): has no rows, got a header only"]),
        (csv_of({}).replace("isl", "length", 1), ["header.isl: is missing"]),
        (csv_of({}).replace("osl", "isl", 1), ["header.isl: is given more than once", "header.osl: is missing"]),
        (csv_of({}).rstrip() + ",more,cells\n", ["row[1]: has cells beyond the header, got ['more', 'cells']"]),
        (csv_of({}).rsplit(",", 2)[0] + "\n", ["row[1].moe_ep_size: is missing", "row[1].silicon_tpot_ms: is missing"]),
    ],
)
def test_file_with_wrong_structure_is_refused(text: str, faults: list[str]) -> None:
    with pytest.raises(ProblemFaults) as caught:
        parse_silicon(text)
    found = sorted(caught.value.faults)
    assert len(found) == len(faults)
    assert all(fault.startswith(start) for fault, start in zip(found, sorted(faults), strict=True))


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProblemFaults, match=r"missing\.csv: No such file"):
        read_silicon(tmp_path / "missing.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemFaults, match="is not UTF-8 text"):
        read_silicon(tmp_path / "binary.csv")
    (tmp_path / "marked.csv").write_text(csv_of({}), encoding="utf-8-sig")
    assert read_silicon(tmp_path / "marked.csv").deployments
    (tmp_path / "zeros.csv").write_bytes(csv_of({}).encode() + b"\x00,\x00\n")
    with pytest.raises(ProblemFaults):
        read_silicon(tmp_path / "zeros.csv")
