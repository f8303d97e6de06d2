"""Measured deployments as a CSV file: TPOT of whole engines under concurrency. Reads it, finding every fault at once.

The columns are those of NVIDIA AIConfigurator's `silicon_sample.csv`; others are passed over. `batch_size` is the
concurrency. What is missing or cannot be modelled makes a row unpredicted, with its reason; what makes no sense at all
(text for a number, a negative time) is a fault of the file.
"""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from orchestrrl.core.documents import read_text
from orchestrrl.core.errors import ProblemFaults, path_of, shorten
from planner.cost.engine_constants import UnknownBackend, constants_of, prior_values
from planner.cost.hardware import GpuModel, UnknownGpu, gpu_named
from planner.cost.models import BF16_BITS, Model, UnknownModel, model_named
from planner.cost.profile import Parallelism
from planner.cost.roofline import ClosedLoop, Precision, kv_capacity_tokens, running_sequences

TEXTS = ("backend", "backend_version", "model_path", "system", "precision", "gemm_quant_mode", "moe_quant_mode")
AT_LEAST_ONE = ("isl", "osl", "batch_size", "tp_size", "pp_size")
AT_LEAST_ZERO = ("attention_dp_size", "moe_tp_size", "moe_ep_size")
MEASURED = "silicon_tpot_ms"
COLUMNS = (*TEXTS, *AT_LEAST_ONE, *AT_LEAST_ZERO, MEASURED)
NEEDED = ("backend", "model_path", "system", "isl", "osl", "batch_size", "tp_size", MEASURED)
WHOLE = ("tp_size", "pp_size", *AT_LEAST_ZERO)

WEIGHT_BITS: dict[str, float | None] = {
    "": None,  # the checkpoint's own
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16", "half"), 16.0),
    **dict.fromkeys(("fp8", "fp8_static", "fp8_block"), 8.0),
    **dict.fromkeys(("fp4", "nvfp4", "int4", "int4_wo"), 4.5),
    **dict.fromkeys(("mxfp4", "w4a16_mxfp4"), 4.25),
}


@dataclass(frozen=True, slots=True)
class MeasuredDeployment:
    """A row that can be predicted."""

    row: int  # 1 is the first below the header
    texts: dict[str, str]
    numbers: dict[str, float]  # those given
    model: Model
    gpu: GpuModel
    parallelism: Parallelism
    precision: Precision
    load: ClosedLoop
    tpot_s: float

    @property
    def backend(self) -> str:
        return self.texts["backend"]

    @property
    def tp(self) -> int:
        return self.parallelism.tp

    @property
    def sequences(self) -> float:
        """Return how many requests run at once."""
        return running_sequences(self.load, kv_capacity_tokens(self.model, self.gpu, self.parallelism, self.precision))

    def but_for_tp(self) -> tuple[str | float | None, ...]:
        """Rows that agree in this differ in TP only, and in how experts are then split."""
        same = ("isl", "osl", "batch_size", "pp_size", "attention_dp_size")
        return (*(self.texts[name] for name in TEXTS), *(self.numbers.get(name) for name in same))


@dataclass(frozen=True, slots=True)
class UnpredictedRow:
    row: int
    model_path: str
    reason: str


@dataclass(frozen=True, slots=True)
class SiliconData:
    deployments: tuple[MeasuredDeployment, ...]
    unpredicted: tuple[UnpredictedRow, ...]


class NotModelled(ValueError):
    """A well-formed row that the cost model has no answer for."""


def read_silicon(path: Path) -> SiliconData:
    """Raises ProblemFaults with every fault of the file."""
    return parse_silicon(read_text(path).removeprefix("\ufeff"))


def parse_silicon(text: str) -> SiliconData:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        header = list(reader.fieldnames or [])
        faults = list(_header_faults(header))
        rows = [] if faults else list(reader)
    except csv.Error as error:
        raise ProblemFaults([f"(document): is not a CSV file: {error}, got line {reader.line_num}"]) from error
    if not faults and not rows:
        faults = ["(document): has no rows, got a header only"]
    for number, row in enumerate(rows, start=1):
        faults += _row_faults(number, row)
    if faults:
        raise ProblemFaults(faults)
    deployments, unpredicted = [], []
    for number, row in enumerate(rows, start=1):
        try:
            deployments.append(_deployment(number, row))
        except (NotModelled, UnknownModel, UnknownGpu, UnknownBackend) as error:
            unpredicted.append(UnpredictedRow(number, row["model_path"], str(error)))
    return SiliconData(tuple(deployments), tuple(unpredicted))


def _header_faults(header: list[str]) -> Iterator[str]:
    for column in COLUMNS:
        if header.count(column) != 1:
            what = "is missing" if column not in header else "is given more than once"
            yield f"header.{column}: {what}, got {shorten(', '.join(header))}"


def _row_faults(number: int, row: dict[str, str]) -> Iterator[str]:
    extra = row.get(None)  # type: ignore[call-overload]  # where csv puts cells beyond the header
    if extra:
        yield f"{path_of(('row', number))}: has cells beyond the header, got {shorten(extra)}"
    for column in COLUMNS:
        text = row[column]
        where = path_of(("row", number, column))
        if text is None:
            yield f"{where}: is missing, got a row that ends before"
        elif column not in TEXTS and text.strip() and (fault := _number_fault(column, text)):
            yield f"{where}: {fault}, got {shorten(text)}"


def _number_fault(column: str, text: str) -> str:
    try:
        value = float(text)
    except ValueError:
        return "should be a number"
    if not isfinite(value):
        return "should be a finite number"
    if column in WHOLE and value != int(value):
        return "should be a whole number"
    if column == MEASURED:
        return "" if value > 0 else "must be > 0"
    least = int(column in AT_LEAST_ONE)
    return "" if value >= least else f"must be >= {least}"


def _deployment(number: int, row: dict[str, str]) -> MeasuredDeployment:
    missing = [column for column in NEEDED if not row[column].strip()]
    if missing:
        raise NotModelled(f"missing: {', '.join(missing)}")
    texts = {name: row[name].strip() for name in TEXTS}
    numbers = {name: float(row[name]) for name in COLUMNS if name not in TEXTS and row[name].strip()}
    if numbers.get("pp_size", 1) > 1:
        raise NotModelled(f"pipeline parallelism is not modelled, pp_size is {numbers['pp_size']:g}")
    model = model_named(texts["model_path"])
    constants_of(prior_values(), texts["backend"])  # raises for an unknown one
    return MeasuredDeployment(
        row=number,
        texts=texts,
        numbers=numbers,
        model=model,
        gpu=gpu_named(texts["system"]),
        parallelism=_parallelism(model, numbers),
        precision=_precision(model, texts),
        load=ClosedLoop(numbers["batch_size"], numbers["isl"], numbers["osl"]),
        tpot_s=numbers[MEASURED] / 1e3,
    )


def _parallelism(model: Model, numbers: dict[str, float]) -> Parallelism:
    dp, ep = (int(max(1.0, numbers.get(name, 1.0))) for name in ("attention_dp_size", "moe_ep_size"))
    return Parallelism(tp=int(numbers["tp_size"]), dp=dp, ep=ep if model.moe else 1)


def _precision(model: Model, texts: dict[str, str]) -> Precision:
    """Experts that are published in 4 bits stay so, and the rest of such a model in 16."""
    mode = (texts["gemm_quant_mode"] or texts["precision"]).lower()
    if mode not in WEIGHT_BITS:
        raise NotModelled(f"unknown quantisation {mode!r}, known: {', '.join(filter(None, WEIGHT_BITS))}")
    bits = WEIGHT_BITS[mode]
    if bits is None:
        bits = 8.0 if "fp8" in texts["model_path"].lower() else model.weight_bits
    if model.expert_bits < 8:
        return Precision(model.weight_bits, model.expert_bits)
    # TensorRT-LLM's checkpoints with static FP8 scales hold scales of the KV cache as well, and it uses them.
    kv_bits = 8.0 if texts["backend"] == "trtllm" and mode in ("fp8", "fp8_static") else BF16_BITS
    return Precision(bits, bits, kv_bits)
