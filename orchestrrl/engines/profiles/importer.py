"""Import profiles from NVIDIA's measured kernel data, through the optional package `aiconfigurator-core`.

The package predicts one batch at a time and does not report whether a batch fits. This module adds the grid of batches
that fit in the KV cache according to the package's memory model, the fits, and the names of layouts. The package's
times cover kernels only; an engine's other overheads are missing.
"""

import importlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, NamedTuple, Protocol

from orchestrrl.core.errors import Permanent, ProblemFaults
from orchestrrl.engines.profiles.measure import MoveLink, move_costs
from orchestrrl.engines.profiles.store import of_fit, tidy
from planner.cost.fit import StepSample, TimedSample, fit_rate, fit_step
from planner.cost.predict import identifier
from planner.cost.profile import EngineProfile, MoveCosts, Parallelism, Profile, ProfileSource, Provenance

PACKAGE = "aiconfigurator-core"
INSTALL = f"{PACKAGE} is not installed; install it with `pip install 'orchestrrl[aiconfigurator]'`"

BACKENDS = ("vllm", "sglang", "trtllm")
# The fraction of a GPU's memory that the engine may use by default: of the total, or of what the weights leave free.
MEMORY_FRACTION = 0.9
PREFILL_BATCH_TOKENS = 8192  # activation memory is sized for this batch
CONTEXTS = (128, 512, 2048, 4096, 8192, 16384, 32768)
PREFILL_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384)


class ImportHandle(Protocol):
    """The methods of `aiconfigurator_core.sdk.engine.EngineHandle` that this module calls. Batch sizes are per
    data-parallel rank."""

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        """Return the duration in milliseconds of the decode step for the last of `osl` tokens after a prompt of `isl`
        tokens. `gen_tokens` is the number of sequences in the batch."""
        ...

    def predict_prefill_latency(self, bs: int, isl: int) -> float:
        """Return the duration in milliseconds of a prefill of `bs` prompts with `isl` tokens each."""
        ...


class ImportInputs(NamedTuple):
    """The numbers that the kernel data does not contain, with their sources. `switch_s` is the time, in seconds, that a
    redeployment takes from the stop of the old engines to the first answer of the new engine."""

    max_sequences: int
    switch_s: float
    sequences_detail: str
    switch_detail: str
    date: str


_LAYOUT = re.compile(r"(?:tp(\d+))?(?:dp(\d+))?(?:ep(\d+))?")


def layout_named(name: str) -> Parallelism:
    """Parse the name of a layout, such as `tp8`, `tp8ep8`, `tp1dp8ep8` or `dp8ep8`. Raises ValueError if it is
    invalid."""
    match = _LAYOUT.fullmatch(name)
    if not name or match is None:
        raise ValueError("must be a layout such as tp2, tp8ep8 or tp1dp8ep8")
    tp, dp, ep = (int(number or 1) for number in match.groups())
    if min(tp, dp, ep) < 1:
        raise ValueError("must have tp, dp and ep of at least 1")
    if ep not in (1, tp * dp):
        raise ValueError(f"must have ep 1, or ep {tp * dp} to spread the experts over all of the engine's GPUs")
    return Parallelism(tp=tp, dp=dp, ep=ep)


def import_profile(
    vendor: "Aiconfigurator",
    layouts: Sequence[Parallelism],
    given: ImportInputs,
    on_layout: Callable[[str], None] = lambda name: None,
) -> tuple[Profile, list[str]]:
    """Return a profile of the layouts that can be imported, and the reasons why the other layouts are left out.
    `on_layout` receives each layout's name before its import. Raises Permanent if no layout can be imported."""
    engines, left_out, moves = [], [], None
    provenance = Provenance(ProfileSource.IMPORTED, given.date, vendor.detail)
    for layout in layouts:
        on_layout(identifier(layout))
        try:
            handle = vendor.compile(layout)
            rank_tokens = vendor.room(layout, given.max_sequences)
            engines.append(engine_profile(handle, layout, rank_tokens, given, provenance))
            moves = moves or _moves(vendor, handle, provenance)
        except ValueError as error:
            left_out.append(f"{identifier(layout)}: {error}")
    if not engines:
        raise Permanent(f"no layout can be imported: {'; '.join(left_out)}")
    return Profile(vendor.model, vendor.system, vendor.backend, tidy(tuple(engines)), tidy(moves)), left_out


def engine_profile(
    handle: ImportHandle, layout: Parallelism, rank_tokens: int, given: ImportInputs, provenance: Provenance
) -> EngineProfile:
    """Return the profile of one layout, fitted to the batches that fit in a KV cache of `rank_tokens` tokens per
    data-parallel rank. Raises ValueError if too few batches fit in the KV cache."""
    fitted = fit_step(step_table(handle, layout, rank_tokens, given.max_sequences), robust=False)
    rate, prefill_error = fit_rate(_prefill_table(handle))
    estimate = f"{provenance.detail}: memory model, {MEMORY_FRACTION:.0%} of the GPU's memory"
    return EngineProfile(
        id=identifier(layout),
        parallelism=layout,
        step=fitted.step,
        prefill_tokens_per_s=rate * layout.dp,
        kv_capacity_tokens=rank_tokens * layout.dp,
        max_sequences=given.max_sequences,
        switch_s=given.switch_s,
        provenance=of_fit(provenance, fitted.error),
        others=(
            ("prefill_tokens_per_s", of_fit(provenance, prefill_error)),
            ("kv_capacity_tokens", Provenance(provenance.source, provenance.date, estimate)),
            ("max_sequences", Provenance(ProfileSource.GIVEN, provenance.date, given.sequences_detail)),
            ("switch_s", Provenance(ProfileSource.GIVEN, provenance.date, given.switch_detail)),
        ),
    )


def step_table(handle: ImportHandle, layout: Parallelism, rank_tokens: int, max_sequences: int) -> list[StepSample]:
    """Return the predicted decode steps of the whole engine for the batches and contexts that fit in a KV cache of
    `rank_tokens` tokens per data-parallel rank. Batch sizes are powers of two and, from 8 on, the sizes halfway between
    them. Raises ValueError if no batch fits."""
    samples = []
    for batch in _batches(max(1, max_sequences // layout.dp)):
        for context in CONTEXTS:
            if batch * (context + 1) <= rank_tokens:
                step_s = handle.decode_step_latency(batch, context, 2) / 1e3
                samples.append(StepSample(batch * layout.dp, batch * context * layout.dp, step_s))
    if not samples:
        raise ValueError(f"no batch of the grid fits in the KV cache of {rank_tokens} tokens per rank")
    return samples


def _batches(most: int) -> list[int]:
    powers = [2**exponent for exponent in range(int(math.log2(most)) + 1)]
    return sorted({*powers, *(3 * power // 2 for power in powers if power >= 8 and 3 * power // 2 <= most), most})


def _prefill_table(handle: ImportHandle) -> list[TimedSample]:
    return [TimedSample(tokens, handle.predict_prefill_latency(1, tokens) / 1e3) for tokens in PREFILL_TOKENS]


def _moves(vendor: "Aiconfigurator", handle: ImportHandle, provenance: Provenance) -> MoveCosts | None:
    """Return the costs of moving a request by recomputation, at the prefill speed of `handle`, and by transfer, at one
    GPU's rate between nodes. Return None if the package has no data for the link."""
    link = vendor.link()
    if link is None:
        return None
    bytes_per_s, latency_s = link
    link_costs = MoveLink(vendor.kv_bytes_per_token(), 8 * bytes_per_s / 1e9, latency_s)
    return move_costs(_prefill_table(handle), link_costs, provenance)


class Aiconfigurator:
    """The `aiconfigurator-core` package for one model, system and backend. Construction raises ProblemFaults if the
    package is missing or has no data for the system or backend."""

    def __init__(self, model: str, system: str, backend: str, *, precision: str = "") -> None:
        try:
            self._engine = importlib.import_module("aiconfigurator_core.sdk.engine")
            self._memory = importlib.import_module("aiconfigurator_core.sdk.memory")
            self._database = importlib.import_module("aiconfigurator_core.sdk.perf_database")
            self._utils = importlib.import_module("aiconfigurator_core.sdk.utils")
        except ModuleNotFoundError as error:
            raise ProblemFaults([INSTALL]) from error
        # The package warns about each table read from another version; the profile already names the version.
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        if backend not in BACKENDS:
            raise ProblemFaults([f"--engine-kind: must be one of {', '.join(BACKENDS)}, got {backend!r}"])
        self._version = self._database.get_latest_database_version(system, backend)
        if self._version is None:
            known = sorted(self._database.get_supported_databases())
            raise ProblemFaults(
                [
                    f"--gpu: must be a system with data for backend {backend}, got {system!r}; systems with data"
                    f" for any backend: {', '.join(known)}"
                ]
            )
        self.model, self.system, self.backend = model, system, backend
        self._precision = {"gemm_quant_mode": precision, "moe_quant_mode": precision} if precision else {}
        package = version(PACKAGE)
        self.detail = f"{PACKAGE} {package}, {system}, {backend} {self._version}" + f", {precision}" * bool(precision)

    def compile(self, layout: Parallelism) -> ImportHandle:
        """Return a handle that predicts this layout's latencies. Raises ValueError, with the package's message, if the
        package cannot predict them."""
        with self._in_our_terms():
            handle: ImportHandle = self._engine.EngineHandle.compile(
                self.model, self.system, self.backend, backend_version=self._version, **self._sizes(layout)
            )
            return handle

    def room(self, layout: Parallelism, sequences: int) -> int:
        """Return the KV capacity, in tokens, of one data-parallel rank of an engine that runs up to `sequences`
        sequences. Raises ValueError, with the package's message, if the package cannot compute it."""
        return int(self._kv(layout, max(1, sequences // layout.dp))["total_kv_size_tokens"])

    def kv_bytes_per_token(self) -> float:
        """Return the number of KV bytes per token for the whole model, as if one GPU held the whole model."""
        return float(self._kv(Parallelism(), 1, gpu_memory_capacity_bytes_override=1 << 50)["kv_size_per_token_bytes"])

    def link(self) -> tuple[float, float] | None:
        """Return one GPU's transfer rate between nodes in bytes/s and the latency in seconds, or None if either is
        unknown."""
        node = self._database.load_system_spec(self.system).get("node", {})
        if not {"inter_node_bw", "p2p_latency"} <= node.keys():
            return None
        return float(node["inter_node_bw"]), float(node["p2p_latency"])

    @contextmanager
    def _in_our_terms(self) -> Iterator[None]:
        """Convert the package's errors in the enclosed block into ValueError. This includes HuggingFaceDownloadError,
        which is raised for a model that is neither bundled nor found in a folder."""
        try:
            yield
        except (ValueError, LookupError, RuntimeError, self._utils.HuggingFaceDownloadError) as error:
            raise ValueError(" ".join(str(error).split())) from error

    def _sizes(self, layout: Parallelism) -> dict[str, Any]:
        # Without expert parallelism, each expert is split over all GPUs. Dense models ignore these sizes.
        spread = {"moe_ep_size": layout.ep, "moe_tp_size": layout.gpus // layout.ep}
        return {"tp_size": layout.tp, "attention_dp_size": layout.dp, **spread, **self._precision}

    def _kv(self, layout: Parallelism, sequences: int, **more: Any) -> dict[str, Any]:
        with self._in_our_terms():
            estimate: dict[str, Any] = self._memory.estimate_kv_cache(
                self.model,
                self.system,
                self.backend,
                self._version,
                max_num_tokens=PREFILL_BATCH_TOKENS,
                max_batch_size=sequences,
                memory_fraction_kind="of_free" if self.backend == "trtllm" else "of_total",
                memory_fraction_value=MEMORY_FRACTION,
                **self._sizes(layout),
                **more,
            )
            return estimate
