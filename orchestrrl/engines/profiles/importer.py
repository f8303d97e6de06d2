"""Profiles from NVIDIA's measured kernel data, through the optional package `aiconfigurator-core`.

It answers for one batch at a time and never says whether a batch fits; here are the grid within the KV cache that its
memory model leaves, the fits, and the names of layouts. Its times are kernels': what an engine does besides is missing.
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
INSTALL = f"{PACKAGE} is not installed here; it comes with `pip install 'orchestrrl[aiconfigurator]'`"

BACKENDS = ("vllm", "sglang", "trtllm")
# Of a GPU's memory, what the engine may use by default: all of it, or what is free after the weights.
MEMORY_FRACTION = 0.9
PREFILL_BATCH_TOKENS = 8192  # activations are sized for this many
CONTEXTS = (128, 512, 2048, 4096, 8192, 16384, 32768)
PREFILL_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384)


class ImportHandle(Protocol):
    """`aiconfigurator_core.sdk.engine.EngineHandle`, as far as it is used. Batches are per data-parallel rank."""

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        """Milliseconds of the decode step that makes the last of `osl` tokens after `isl`."""
        ...

    def predict_prefill_latency(self, bs: int, isl: int) -> float:
        """Milliseconds."""
        ...


class ImportInputs(NamedTuple):
    """What kernel data cannot tell, and where the figures come from."""

    max_sequences: int
    switch_s: float
    sequences_detail: str
    switch_detail: str
    date: str


_LAYOUT = re.compile(r"(?:tp(\d+))?(?:dp(\d+))?(?:ep(\d+))?")


def layout_named(name: str) -> Parallelism:
    """`tp8`, `tp8ep8`, `tp1dp8ep8`, `dp8ep8`. Raises ValueError."""
    match = _LAYOUT.fullmatch(name)
    if not name or match is None:
        raise ValueError("must be a layout such as tp2, tp8ep8 or tp1dp8ep8")
    tp, dp, ep = (int(number or 1) for number in match.groups())
    if min(tp, dp, ep) < 1:
        raise ValueError("must have sizes of at least 1")
    if ep not in (1, tp * dp):
        raise ValueError("experts are spread over all of an engine's GPUs or not at all: ep must be 1 or tp x dp")
    return Parallelism(tp=tp, dp=dp, ep=ep)


def import_profile(
    vendor: "Aiconfigurator",
    layouts: Sequence[Parallelism],
    given: ImportInputs,
    on_layout: Callable[[str], None] = lambda name: None,
) -> tuple[Profile, list[str]]:
    """A profile of all layouts that fit, and the others with their reasons. Raises Permanent where none fits."""
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
        raise Permanent("no layout can be imported: " + "; ".join(left_out))
    return Profile(vendor.model, vendor.system, vendor.backend, tidy(tuple(engines)), tidy(moves)), left_out


def engine_profile(
    handle: ImportHandle, layout: Parallelism, rank_tokens: int, given: ImportInputs, provenance: Provenance
) -> EngineProfile:
    """Fits over the batches that fit into the KV cache of `rank_tokens` for each data-parallel rank. Raises ValueError
    where hardly any does."""
    fitted = fit_step(step_table(handle, layout, rank_tokens, given.max_sequences), robust=False)
    rate, prefill_error = fit_rate(_prefill_table(handle))
    estimate = f"{provenance.detail}: its memory model, {MEMORY_FRACTION:.0%} of the GPU's memory"
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
    """The decode step over batches (doubling, and once between) and contexts that fit, of the whole engine."""
    samples = []
    for batch in _batches(max(1, max_sequences // layout.dp)):
        for context in CONTEXTS:
            if batch * (context + 1) <= rank_tokens:
                step_s = handle.decode_step_latency(batch, context, 2) / 1e3
                samples.append(StepSample(batch * layout.dp, batch * context * layout.dp, step_s))
    if not samples:
        raise ValueError(f"its KV cache of {rank_tokens} tokens holds no batch of the grid")
    return samples


def _batches(most: int) -> list[int]:
    powers = [2**exponent for exponent in range(int(math.log2(most)) + 1)]
    return sorted({*powers, *(3 * power // 2 for power in powers if power >= 8 and 3 * power // 2 <= most), most})


def _prefill_table(handle: ImportHandle) -> list[TimedSample]:
    return [TimedSample(tokens, handle.predict_prefill_latency(1, tokens) / 1e3) for tokens in PREFILL_TOKENS]


def _moves(vendor: "Aiconfigurator", handle: ImportHandle, provenance: Provenance) -> MoveCosts | None:
    """The first layout's prefill, and one GPU's rate between nodes; None where the package does not know the link."""
    link = vendor.link()
    if link is None:
        return None
    bytes_per_s, latency_s = link
    link_costs = MoveLink(vendor.kv_bytes_per_token(), 8 * bytes_per_s / 1e9, latency_s)
    return move_costs(_prefill_table(handle), link_costs, provenance)


class Aiconfigurator:
    """The package itself. Raises ProblemFaults where it is missing or does not know the system or backend."""

    def __init__(self, model: str, system: str, backend: str, *, precision: str = "") -> None:
        try:
            self._engine = importlib.import_module("aiconfigurator_core.sdk.engine")
            self._memory = importlib.import_module("aiconfigurator_core.sdk.memory")
            self._database = importlib.import_module("aiconfigurator_core.sdk.perf_database")
            self._utils = importlib.import_module("aiconfigurator_core.sdk.utils")
        except ModuleNotFoundError as error:
            raise ProblemFaults([INSTALL]) from error
        # It warns of each table that it reads from another version; the profile names the version.
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        if backend not in BACKENDS:
            raise ProblemFaults([f"--backend: must be one of {', '.join(BACKENDS)}, got {backend!r}"])
        self._version = self._database.get_latest_database_version(system, backend)
        if self._version is None:
            known = sorted(self._database.get_supported_databases())
            raise ProblemFaults([f"--system: has no data for {backend} (known: {', '.join(known)}), got {system!r}"])
        self.model, self.system, self.backend = model, system, backend
        self._precision = {"gemm_quant_mode": precision, "moe_quant_mode": precision} if precision else {}
        package = version(PACKAGE)
        self.detail = f"{PACKAGE} {package}, {system}, {backend} {self._version}" + f", {precision}" * bool(precision)

    def compile(self, layout: Parallelism) -> ImportHandle:
        """Raises ValueError in the package's words, as `room` does."""
        with self._in_our_terms():
            handle: ImportHandle = self._engine.EngineHandle.compile(
                self.model, self.system, self.backend, backend_version=self._version, **self._sizes(layout)
            )
            return handle

    def room(self, layout: Parallelism, sequences: int) -> int:
        """Return the tokens that the KV cache of one data-parallel rank holds."""
        return int(self._kv(layout, max(1, sequences // layout.dp))["total_kv_size_tokens"])

    def kv_bytes_per_token(self) -> float:
        """Of the whole model: what one GPU would hold, had it room for all."""
        return float(self._kv(Parallelism(), 1, gpu_memory_capacity_bytes_override=1 << 50)["kv_size_per_token_bytes"])

    def link(self) -> tuple[float, float] | None:
        """Bytes/s of one GPU between nodes, and seconds of latency."""
        node = self._database.load_system_spec(self.system).get("node", {})
        if not {"inter_node_bw", "p2p_latency"} <= node.keys():
            return None
        return float(node["inter_node_bw"]), float(node["p2p_latency"])

    @contextmanager
    def _in_our_terms(self) -> Iterator[None]:
        """The package's ways to refuse, as one. A model that it neither bundles nor finds in a folder is one of them:
        it would have been fetched."""
        try:
            yield
        except (ValueError, LookupError, RuntimeError, self._utils.HuggingFaceDownloadError) as error:
            raise ValueError(" ".join(str(error).split())) from error

    def _sizes(self, layout: Parallelism) -> dict[str, Any]:
        # Where experts are not spread, each is cut over all GPUs. Dense models take no notice.
        spread = {"moe_ep_size": layout.ep, "moe_tp_size": layout.gpus // layout.ep}
        return {"tp_size": layout.tp, "attention_dp_size": layout.dp, **spread, **self._precision}

    def _kv(self, layout: Parallelism, sequences: int, **more: Any) -> dict[str, Any]:
        with self._in_our_terms():
            told: dict[str, Any] = self._memory.estimate_kv_cache(
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
            return told
