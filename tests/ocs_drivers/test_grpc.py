"""Run the conformance suite on a device in another process, behind the service OcsDriver, and break its connection."""

import asyncio
from typing import Any

import grpc
import pytest

from ocs_drivers.conformance import carry_out, refusal, until
from ocs_drivers.errors import CircuitConflict, DriverOutcomeUnknown, DriverPermanent, DriverRetryable, InvalidOptions
from ocs_drivers.model import ChangeMode, CircuitChange, CircuitDiff, CrossConnect
from ocs_drivers.registry import make_driver
from ocs_drivers.virtual import VirtualSwitch
from orchestrrl.rpc.ocs_server import OcsDriverService, serve_driver
from orchestrrl.rpc.pb import ocs_pb2, ocs_pb2_grpc


async def test_missing_process_is_retryable() -> None:
    driver = make_driver("grpc", "lab1", {"target": "127.0.0.1:1"})
    async with refusal(DriverRetryable, "lab1", "127.0.0.1:1"):
        await driver.cross_connects()
    await driver.close()


async def test_invalid_answers_are_refused() -> None:
    class Confused(OcsDriverService):
        async def ListPorts(self, request: object, context: object) -> ocs_pb2.ListPortsResponse:
            return ocs_pb2.ListPortsResponse(ports=[ocs_pb2.PortState(port=1, status=99)])

        async def Commit(self, request: ocs_pb2.CommitRequest, context: object) -> ocs_pb2.CommitResult:
            await super().Commit(request, context)
            return ocs_pb2.CommitResult()

    server = grpc.aio.server()
    switch = VirtualSwitch("served", reconfiguration_s=0.002)
    ocs_pb2_grpc.add_OcsDriverServicer_to_server(Confused(switch), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    driver = make_driver("grpc", "lab1", {"target": f"127.0.0.1:{port}"})
    async with refusal(DriverPermanent, "lab1", "status"):
        await driver.ports()
    result = await carry_out(driver, (CrossConnect(1, 17),))
    assert result.done
    assert "must return a result for every circuit" in result.items[0].detail
    await driver.close()
    await server.stop(None)


async def test_commit_without_process_is_retryable() -> None:
    driver = make_driver("grpc", "lab1", {"target": "127.0.0.1:1", "command_timeout_s": 0.1})
    async with refusal(DriverRetryable, "nothing was sent"):
        await driver.commit(CircuitDiff(ChangeMode.SAFE, 0, frozenset(), (), (CrossConnect(1, 17),)), 0)
    await driver.close()


async def test_process_death_during_commit_is_outcome_unknown() -> None:
    switch = VirtualSwitch("served", reconfiguration_s=0.5)
    server, port = await serve_driver(switch, "127.0.0.1:0")
    driver = make_driver("grpc", "lab1", {"target": f"127.0.0.1:{port}"})
    diff = await driver.plan(CircuitChange((CrossConnect(1, 17),)))
    heard = switch.model.listen()
    commit = asyncio.ensure_future(driver.commit(diff, diff.revision))
    await asyncio.wait_for(heard.get(), 30)
    await server.stop(None)
    async with refusal(DriverOutcomeUnknown, "lab1"):
        await commit
    await driver.close()


async def _restarted(switch: VirtualSwitch, port: int) -> tuple[grpc.aio.Server, VirtualSwitch]:
    """Serve the same device from another process, which has no record of earlier circuits."""
    again = VirtualSwitch("served", reconfiguration_s=0.002)
    again.wire._model = switch.model
    again.model = switch.model
    server, _ = await serve_driver(again, f"127.0.0.1:{port}")
    return server, again


async def test_restarted_process_gets_ownership_back() -> None:
    switch = VirtualSwitch("served", reconfiguration_s=0.002)
    one, two, theirs = CrossConnect(1, 17), CrossConnect(2, 18), CrossConnect(3, 19)
    switch.model.add([theirs])
    server, port = await serve_driver(switch, "127.0.0.1:0")
    driver = make_driver("grpc", "lab1", {"target": f"127.0.0.1:{port}"})
    assert (await carry_out(driver, (one, two))).done
    diff = await driver.plan(CircuitChange(disconnect=(one,)))
    await server.stop(None)
    server, again = await _restarted(switch, port)
    assert (await again.cross_connects()).foreign == {one, two, theirs}
    assert (await driver.commit(diff, diff.revision)).done  # refused at first, then ownership is restored
    assert (await again.cross_connects()).foreign == {theirs}
    async with refusal(CircuitConflict, "3:19", "is not owned"):
        await driver.plan(CircuitChange(disconnect=(theirs,)))
    await server.stop(None)
    server, again = await _restarted(switch, port)
    assert (await driver.cross_connects()).foreign == {theirs}
    await driver.close()
    await server.stop(None)


async def test_serving_process_reverts_unconfirmed_trial() -> None:
    switch = VirtualSwitch("served", reconfiguration_s=0.002)
    server, port = await serve_driver(switch, "127.0.0.1:0")
    driver = make_driver("grpc", "lab1", {"target": f"127.0.0.1:{port}"})
    diff = await driver.plan(CircuitChange((CrossConnect(1, 17),)))
    assert (await driver.commit(diff, diff.revision, 0.05)).done
    await driver.close()
    await until(switch, lambda reading: reading.unconfirmed is None, "reverted")
    assert switch.model.circuits() == []
    await server.stop(None)


async def test_trial_time_is_readable_after_lost_answer() -> None:
    switch = VirtualSwitch("served", reconfiguration_s=0.2)
    server, port = await serve_driver(switch, "127.0.0.1:0")
    driver = make_driver("grpc", "lab1", {"target": f"127.0.0.1:{port}", "commit_timeout_s": 0.05})
    diff = await driver.plan(CircuitChange((CrossConnect(1, 17),)))
    await driver.commit(diff, diff.revision, 50.0)
    reading = await until(driver, lambda reading: bool(reading.unconfirmed and reading.unconfirmed.until_s), "done")
    await switch.confirm(reading.revision)
    assert (await driver.cross_connects()).unconfirmed is None
    await driver.close()
    await server.stop(None)


async def test_commit_with_lost_answer_is_read_back() -> None:
    switch = VirtualSwitch("served", reconfiguration_s=0.2)
    server, port = await serve_driver(switch, "127.0.0.1:0")
    driver = make_driver("grpc", "lab1", {"target": f"127.0.0.1:{port}", "commit_timeout_s": 0.05})
    result = await carry_out(driver, (CrossConnect(1, 17), CrossConnect(2, 18)))
    assert result.done
    assert "DEADLINE_EXCEEDED" in result.items[0].detail
    await driver.close()
    await server.stop(None)


@pytest.mark.parametrize(
    ("name", "options", "fault"),
    [
        (
            "scpii",
            {},
            "driver: must be one of calient_rest, gnmi, grpc, netconf, restconf, scpi, tl1, virtual, got 'scpii'",
        ),
        ("grpc", {}, "options.target: is missing"),
        ("grpc", {"target": ""}, "options.target: must be HOST:PORT, got ''"),
        ("virtual", {"prots": 32}, "options.prots: is not known (known: boot, bulk,"),
        ("virtual", {"ports": 31, "seed": "x"}, "options.ports: must be an even number >= 2, got 31"),
        ("virtual", {"ports": 31, "seed": "x"}, "options.seed: must be a whole number, got 'x'"),
        ("virtual", {"faults": [{"kind": "fail"}]}, "options.faults[0].kind: must be one of fail_port,"),
        ("virtual", {"faults": [{"kind": "fail_port", "port": 99}]}, "port must be within 1..32, got 99"),
    ],
)
def test_invalid_options_are_reported_by_name(name: str, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidOptions) as refused:
        make_driver(name, "ocs1", options)
    assert fault in str(refused.value)


async def test_malformed_requests_and_defects_fail_only_their_call(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = VirtualSwitch("served", ports=8)
    server, port = await serve_driver(driver, "127.0.0.1:0")
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = ocs_pb2_grpc.OcsDriverStub(channel)
            for name in ("Commit", "Plan", "GetFacts"):
                raw = channel.unary_unary(f"/orchestrrl.v1.OcsDriver/{name}", None, None)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await raw(b"\x0a\xff\xff\xff\xff\x0f")
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert not [record for record in caplog.records if record.exc_info]

            async def fails() -> None:
                raise KeyError("secret")

            monkeypatch.setattr(driver, "ports", fails)
            with pytest.raises(grpc.aio.AioRpcError) as defect:
                await stub.ListPorts(ocs_pb2.ListPortsRequest())
            assert defect.value.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in str(defect.value.details())
            monkeypatch.undo()
            assert len((await stub.ListPorts(ocs_pb2.ListPortsRequest())).ports) == 8
    finally:
        await server.stop(0)
        await driver.close()
