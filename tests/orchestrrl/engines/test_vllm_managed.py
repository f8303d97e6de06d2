"""The managed vLLM client with servers that fail or lack features. The conformance suite covers correct ones."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from orchestrrl.core.errors import OrchestrRLError, OutcomeUnknown, Permanent, Retryable
from orchestrrl.engines.base import AnswerExcerpt, LoadedWeights, ReportedLayout, connect_managed
from orchestrrl.engines.managed_conformance import write_version
from orchestrrl.engines.serving import ServingFacts
from orchestrrl.engines.vllm import VllmEngine
from orchestrrl.engines.vllm_info import BEGAN_AT, VllmServerInfo, read_server_info
from orchestrrl.engines.vllm_weight_flags import BACKEND
from orchestrrl.integrations.instrument.checkpoint_files import MODEL_FILE, folder_sum

PARALLEL = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 4,
    "data_parallel_size_local": 1,
    "enable_expert_parallel": True,
    "enable_elastic_ep": True,
}
ERROR = {"error": {"message": "no", "type": "InternalServerError", "param": None, "code": 500}}
LOGPROBS = {"token_logprobs": [-0.5, -1.0]}


class FakeServer:
    """A fake vLLM server that carries out orders, and answers some paths with another status or body."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.asked: list[str] = []
        self.began: list[str] = []  # start times that its metrics report in order, the last one repeatedly; empty: none
        self.backend: str | None = None
        self.answers: dict[str, tuple[int, Any]] = {}
        self.without: set[str] = set()  # paths that it lacks
        self.paused = False
        self.sleeping = False
        self.awake = 1
        self.name = "default"
        self.parallel: dict[str, Any] = dict(PARALLEL)
        self.model: dict[str, Any] = {"enable_sleep_mode": True}
        self.choice: dict[str, Any] = {"token_ids": [5, 6], "logprobs": LOGPROBS, "finish_reason": "length"}
        self.hangs = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if request.method == "POST":
            self.received.append(request.path_qs)
        else:
            self.asked.append(path)
        if path == self.hangs:
            await asyncio.sleep(30)
        if path in self.without:
            raise web.HTTPNotFound
        if path in self.answers:
            status, body = self.answers[path]
            return web.json_response(body, status=status)
        body = await request.json() if request.can_read_body else {}
        match path:
            case "/pause" | "/resume":
                self.paused = path == "/pause"
            case "/update_weight_version":
                self.name = body["new_version"]
            case "/sleep" | "/wake_up":
                self.sleeping = path == "/sleep"
                self.awake = int(not self.sleeping)
            case "/scale_elastic_ep":
                self.parallel["data_parallel_size"] = body["new_data_parallel_size"]
            case "/metrics":
                state = f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {self.awake}\n'
                began = self.began.pop(0) if len(self.began) > 1 else "".join(self.began)
                return web.Response(text=state + IDLE + (f"{BEGAN_AT}{began}\n" if began else ""))
        return web.json_response(self._told(path))

    def _told(self, path: str) -> Any:
        offered = {"/openapi.json", "/pause", "/resume", "/is_paused", "/is_sleeping", "/sleep", "/wake_up"}
        offered |= {"/start_weight_update", "/update_weights", "/finish_weight_update"}
        offered |= {"/collective_rpc", "/server_info", "/weight_info", "/update_weight_version", "/scale_elastic_ep"}
        config = {
            "parallel_config": self.parallel,
            "model_config": self.model,
            "weight_transfer_config": {"backend": self.backend},
            "scheduler_config": {"max_num_seqs": 8},
        }
        found: dict[str, Any] = {
            "/openapi.json": {"paths": dict.fromkeys(offered - self.without), "components": {"schemas": {}}},
            "/server_info": {"vllm_config": config},
            "/is_paused": {"is_paused": self.paused},
            "/is_sleeping": {"is_sleeping": self.sleeping or self.paused},
            "/weight_info": {"weight_version": self.name},
            "/v1/models": {"data": [{"id": "m", "max_model_len": 100}]},
            "/v1/completions": {"choices": [self.choice]},
        }
        return found.get(path, {})


IDLE = "".join(
    f'vllm:{name}{{engine="0"}} 0\n'
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "generation_tokens_total",
        "prompt_tokens_total",
        "num_preemptions_total",
    )
)


@pytest.fixture
def fake() -> FakeServer:
    return FakeServer()


@pytest.fixture
async def engine(fake: FakeServer) -> AsyncIterator[VllmEngine]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", fake.answer)
    async with TestServer(application) as server:
        engine = VllmEngine(str(server.make_url("/")), timeout_s=3.0)
        yield engine
        await engine.close()


async def test_layout_seats_and_features_come_from_server_info(engine: VllmEngine, fake: FakeServer) -> None:
    assert await engine.layout() == ReportedLayout(tp=2, pp=1, dp=4, ep=True)
    found = await engine.capabilities()
    assert (found.max_sequences, found.sleep, found.scale_elastic_ep) == (32, True, True)
    fake.parallel["enable_elastic_ep"] = fake.model["enable_sleep_mode"] = False
    found = await engine.capabilities()
    assert (found.sleep, found.scale_elastic_ep) == (False, False), "its endpoints are there all the same"
    fake.without = {"/server_info"}
    found = await engine.capabilities()
    assert (found.max_sequences, found.sleep, found.scale_elastic_ep) == (None, False, False)
    assert await engine.layout() == ReportedLayout()
    for order in (engine.sleep, engine.wake):
        with pytest.raises(Permanent, match="--enable-sleep-mode"):
            await order()
    with pytest.raises(Permanent, match="--enable-elastic-ep"):
        await engine.scale(2)
    assert fake.received == []


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({"vllm_config": "as text"}, VllmServerInfo()),
        ({"vllm_config": {"scheduler_config": {"max_num_seqs": 3}}}, VllmServerInfo(max_sequences=3)),
        (
            {
                "vllm_config": {
                    "scheduler_config": {"max_num_seqs": 3},
                    "parallel_config": {
                        "data_parallel_size": 4,
                        "data_parallel_size_local": 2,
                        "data_parallel_hybrid_lb": True,
                    },
                }
            },
            VllmServerInfo(max_sequences=6, replicas=4, serving=ServingFacts(dp=2)),
        ),
        *(
            (
                {
                    "vllm_config": {
                        "scheduler_config": {"max_num_seqs": 3},
                        part: {"enable_return_routed_experts": True},
                    }
                },
                VllmServerInfo(max_sequences=3, routed_experts=True),
            )
            for part in ("aux_output_config", "model_config")
        ),
    ],
)
def test_missing_server_info_fields_stay_unknown(info: dict[str, Any], found: VllmServerInfo) -> None:
    assert read_server_info(info) == found


async def test_server_info_is_cached_per_process(engine: VllmEngine, fake: FakeServer) -> None:
    fake.began, fake.backend = ["1.5e+09"], BACKEND
    assert not await engine.weights.takes_sums()
    assert [await engine.weights.has_backend() for _ in range(2)] == [True, True]
    assert [fake.asked.count(path) for path in ("/openapi.json", "/server_info")] == [1, 1]
    fake.began, fake.backend = ["1.6e+09"], None
    assert [await engine.weights.has_backend() for _ in range(2)] == [False, False]
    fake.began, fake.backend = ["1.7e+09"], BACKEND
    fake.without = {"/update_weights"}
    assert not await engine.weights.has_backend()
    assert [fake.asked.count(path) for path in ("/openapi.json", "/server_info")] == [3, 3]


@pytest.mark.parametrize("began", [[], ["1.5e+09", "1.6e+09"]], ids=["not reported", "is followed by another"])
async def test_server_info_of_uncertain_process_is_not_cached(
    engine: VllmEngine, fake: FakeServer, began: list[str]
) -> None:
    fake.began, fake.backend = began, BACKEND
    assert await engine.weights.has_backend()
    fake.backend = None
    assert not await engine.weights.has_backend()


async def test_failed_server_info_is_not_cached(engine: VllmEngine, fake: FakeServer) -> None:
    fake.began, fake.backend = ["1.5e+09"], BACKEND
    fake.answers["/server_info"] = (500, ERROR)
    with pytest.raises(Retryable):
        await engine.weights.has_backend()
    fake.answers = {}
    assert await engine.weights.has_backend()


async def test_load_pauses_the_engine_and_discards_its_kv(engine: VllmEngine, fake: FakeServer) -> None:
    await engine.weights.load_weights(Path("/shared/7"), 7, None)
    assert fake.received == [
        "/pause?mode=keep",
        "/update_weight_version",
        "/collective_rpc",
        "/update_weight_version",
        "/resume",
    ]
    assert await engine.weight_version() == 7
    assert not fake.paused


async def test_folder_with_known_sum_is_checked_but_not_summed(
    engine: VllmEngine, fake: FakeServer, tmp_path: Path
) -> None:
    assert await engine.weights.takes_sums()
    folder = write_version(tmp_path / "v7", 7)
    assert await engine.weights.load_weights(folder, 7) == LoadedWeights(7, folder_sum(folder))
    assert await engine.weights.load_weights(folder, 8, "known") == LoadedWeights(8, "known")
    (folder / MODEL_FILE).write_bytes(b"cut")
    with pytest.raises(Permanent, match="truncated"):
        await engine.weights.load_weights(folder, 9, "known")
    assert fake.name == "8"


async def test_server_without_version_endpoint_loads_weights_without_a_version(
    engine: VllmEngine, fake: FakeServer
) -> None:
    fake.without = {"/update_weight_version", "/weight_info"}
    await engine.weights.load_weights(Path("/shared/7"), 7, None)
    await engine.name_weights(7)
    assert fake.received == ["/pause?mode=keep", "/collective_rpc", "/resume"]
    assert await engine.weight_version() is None


@pytest.mark.parametrize("name", ["default", "", "step-7", "7.5", "-7", None])
async def test_weight_name_that_is_not_a_number_is_no_version(engine: VllmEngine, fake: FakeServer, name: Any) -> None:
    fake.name = name
    assert await engine.weight_version() is None


# The failing path, the error, whether the engine stays paused, and whether it still has the old version's name.
LOADS: list[tuple[str, int, type[OrchestrRLError], bool, bool]] = [
    ("/pause", 503, Retryable, False, True),
    ("/pause", 500, OutcomeUnknown, False, True),
    ("/update_weight_version", 400, Permanent, False, True),
    ("/collective_rpc", 500, OutcomeUnknown, True, False),
    ("/collective_rpc", 400, OutcomeUnknown, True, False),
    ("/resume", 500, OutcomeUnknown, True, False),
    ("/openapi.json", 500, Retryable, False, True),
    ("/is_paused", 503, Retryable, False, True),
]


@pytest.mark.parametrize(("path", "status", "error", "paused", "named"), LOADS)
async def test_failed_load_restores_or_keeps_the_engine_paused(
    engine: VllmEngine,
    fake: FakeServer,
    path: str,
    status: int,
    error: type[OrchestrRLError],
    paused: bool,
    named: bool,
) -> None:
    fake.name = "6"
    fake.answers[path] = (status, ERROR)
    with pytest.raises(error):
        await engine.weights.load_weights(Path("/shared/7"), 7, None)
    assert fake.paused is paused
    assert (fake.name == "6") is named, "weights that may be half new must not have the old ones' name"


async def test_load_without_development_endpoints_lists_the_missing_ones(engine: VllmEngine, fake: FakeServer) -> None:
    fake.without = {"/collective_rpc", "/pause"}
    with pytest.raises(Permanent, match="/collective_rpc, /pause; start the server with VLLM_SERVER_DEV_MODE=1"):
        await engine.weights.load_weights(Path("/shared/7"), 7, None)
    assert fake.received == []


CHOICES: list[dict[str, Any]] = [
    {},
    {"token_ids": [5], "logprobs": LOGPROBS, "finish_reason": "length"},
    {"token_ids": [5, 6], "logprobs": None, "finish_reason": "length"},
    {"token_ids": [5, 6], "logprobs": {"token_logprobs": [-0.5, None]}, "finish_reason": "length"},
    {"token_ids": [], "logprobs": {"token_logprobs": []}, "finish_reason": "length"},
]


@pytest.mark.parametrize("choice", CHOICES)
async def test_malformed_excerpt_is_permanent(engine: VllmEngine, fake: FakeServer, choice: dict[str, Any]) -> None:
    fake.choice = choice
    with pytest.raises(Permanent, match="the answer is not one of vllm"):
        await engine.excerpt([1, 2], 2)


TEXT = AnswerExcerpt((1, 2), (5, 6), (-0.5, -1.0))
SCORES: list[tuple[Any, tuple[float, ...] | None]] = [
    (
        [None, {"2": {"logprob": -9}}, {"5": {"logprob": -1.5}, "7": {"logprob": -1}}, {"6": {"logprob": -2}}],
        (-1.5, -2),
    ),
    ([None, {"2": {"logprob": -9}}, {"7": {"logprob": -1}}, {"6": {"logprob": -2}}], None),
    ([{"5": {"logprob": -1.5}}, {"6": {"logprob": -2}}], None),
    (None, None),
]


@pytest.mark.parametrize(("listed", "scores"), SCORES)
async def test_scores_belong_to_the_excerpts_tokens(
    engine: VllmEngine, fake: FakeServer, listed: Any, scores: tuple[float, ...] | None
) -> None:
    fake.choice = {"prompt_logprobs": listed, "finish_reason": "length"}
    if scores is not None:
        assert await engine.score(TEXT) == scores
        return
    with pytest.raises(Permanent, match="the answer is not one of vllm"):
        await engine.score(TEXT)


@pytest.mark.parametrize("ask", [lambda e: e.excerpt([1], 2), lambda e: e.score(TEXT)], ids=["excerpt", "score"])
async def test_interrupted_queries_are_retryable(
    engine: VllmEngine, fake: FakeServer, ask: Callable[[VllmEngine], Awaitable[object]]
) -> None:
    fake.choice["finish_reason"] = "abort"
    with pytest.raises(Retryable, match="must have finish_reason length or stop"):
        await ask(engine)
    fake.hangs = "/v1/completions"
    with pytest.raises(Retryable):
        await ask(engine)
    gone = connect_managed("vllm", f"http://127.0.0.1:{unused_port()}")
    with pytest.raises(Retryable):
        await ask(gone)  # type: ignore[arg-type]
    await gone.close()


async def test_paused_engine_is_not_asleep(engine: VllmEngine, fake: FakeServer) -> None:
    fake.paused = True
    assert not await engine.asleep()
    await engine.sleep()
    await engine.sleep()
    assert fake.received == ["/sleep?level=1"]
    assert await engine.asleep()
    with pytest.raises(Permanent, match="is asleep"):
        await engine.weights.load_weights(Path("/shared/7"), 7, None)
    await engine.wake()
    assert not await engine.asleep()
    fake.without = {"/is_sleeping"}
    assert not await engine.asleep()


ORDERS: list[tuple[str, int, Any, type[OrchestrRLError]]] = [
    ("/sleep", 500, ERROR, OutcomeUnknown),
    ("/sleep", 422, ERROR, Permanent),
    ("/wake_up", 503, ERROR, Retryable),
    ("/wake_up", 500, "worker died", OutcomeUnknown),
    ("/wake_up", 200, {"status": "sleeping", "tags": ["weights"]}, OutcomeUnknown),
    ("/scale_elastic_ep", 400, {"detail": "new_data_parallel_size must be a positive integer"}, Permanent),
    ("/scale_elastic_ep", 408, {"detail": "Scale failed due to request drain timeout"}, OutcomeUnknown),
    ("/scale_elastic_ep", 500, {"detail": "Scale failed"}, OutcomeUnknown),
    ("/scale_elastic_ep", 503, {"error": "The model is currently scaling. Please try again later."}, Retryable),
    ("/scale_elastic_ep", 200, {"message": "and yet it did not"}, OutcomeUnknown),
]


@pytest.mark.parametrize(("path", "status", "body", "error"), ORDERS)
async def test_failed_order_has_an_unknown_outcome_unless_rejected(
    engine: VllmEngine, fake: FakeServer, path: str, status: int, body: Any, error: type[OrchestrRLError]
) -> None:
    fake.answers[path] = (status, body)
    orders = {"/sleep": engine.sleep, "/wake_up": engine.wake, "/scale_elastic_ep": lambda: engine.scale(8)}
    with pytest.raises(error) as raised:
        await orders[path]()
    assert engine.url in str(raised.value)


async def test_scale_reaches_the_ordered_replicas(engine: VllmEngine, fake: FakeServer) -> None:
    await engine.scale(8)
    assert (await engine.layout()).dp == 8
    assert fake.received == ["/scale_elastic_ep"]
