"""Read measured deployments from a CSV file: the TPOT of whole engines at a given concurrency.

The columns are those of NVIDIA AIConfigurator's `silicon_sample.csv`; other columns are ignored. `batch_size` is the
concurrency. A row with missing or unsupported values is reported as unpredicted, with a reason. An invalid value (text
for a number, a negative time) is a fault of the file. All faults are reported at once.
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
    """One row of a CSV file of measured deployments. The cost model can predict its TPOT."""

    row: int  # 1 is the first row below the header
    texts: dict[str, str]
    numbers: dict[str, float]  # only the values that are given
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
        """The number of requests that the engine runs at once."""
        return running_sequences(self.load, kv_capacity_tokens(self.model, self.gpu, self.parallelism, self.precision))

    def but_for_tp(self) -> tuple[str | float | None, ...]:
        """Return a key that is equal for all rows that differ only in TP and in the split of experts that results from
        TP."""
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
    """Raised if a row is well-formed but the cost model does not support it."""


def read_silicon(path: Path) -> SiliconData:
    """Read the measured deployments from a CSV file. Raises ProblemFaults, listing every fault, if the file is
    invalid."""
    return parse_silicon(read_text(path).removeprefix("\ufeff"))


def parse_silicon(text: str) -> SiliconData:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        header = list(reader.fieldnames or [])
        faults = list(_header_faults(header))
        rows = [] if faults else list(reader)
    except csv.Error as error:
        raise ProblemFaults([f"(document): line {reader.line_num} is not valid CSV: {error}"]) from error
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
    extra = row.get(None)  # type: ignore[call-overload]  # csv stores cells beyond the header here
    if extra:
        yield f"{path_of(('row', number))}: has cells beyond the header, got {shorten(extra)}"
    for column in COLUMNS:
        text = row[column]
        where = path_of(("row", number, column))
        if text is None:
            yield f"{where}: is missing, got a row that ends before it"
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
        raise NotModelled(f"the row has no value for {', '.join(missing)}")
    texts = {name: row[name].strip() for name in TEXTS}
    numbers = {name: float(row[name]) for name in COLUMNS if name not in TEXTS and row[name].strip()}
    if numbers.get("pp_size", 1) > 1:
        raise NotModelled(f"pipeline parallelism is not supported: pp_size must be 1, got {numbers['pp_size']:g}")
    model = model_named(texts["model_path"])
    constants_of(prior_values(), texts["backend"])  # raises if the backend is unknown
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
    """Return the precision of a measured deployment from the texts of its row. If a model's experts are published in 4
    bits, they keep 4 bits, and the rest of the model keeps its published precision."""
    mode = (texts["gemm_quant_mode"] or texts["precision"]).lower()
    if mode not in WEIGHT_BITS:
        raise NotModelled(f"the quantisation must be one of {', '.join(filter(None, WEIGHT_BITS))}, got {mode!r}")
    bits = WEIGHT_BITS[mode]
    if bits is None:
        bits = 8.0 if "fp8" in texts["model_path"].lower() else model.weight_bits
    if model.expert_bits < 8:
        return Precision(model.weight_bits, model.expert_bits)
    # TensorRT-LLM's checkpoints with static FP8 scales also contain scales of the KV cache, which it uses.
    kv_bits = 8.0 if texts["backend"] == "trtllm" and mode in ("fp8", "fp8_static") else BF16_BITS
    return Precision(bits, bits, kv_bits)
