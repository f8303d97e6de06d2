"""For any HTTP answer of a device, the verbs of both wires return a result or raise a driver error. After a setter they
do not assume more than is known."""

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ocs_drivers.base import SwitchWire, SystemClock
from ocs_drivers.calient_rest import CalientOptions, CalientRestWire, CrossConnectDirection
from ocs_drivers.errors import DriverError, DriverOutcomeUnknown
from ocs_drivers.http_session import DeviceResponse
from ocs_drivers.model import Action, CrossConnect
from ocs_drivers.restconf import ChangeWith, RestconfOptions, RestconfWire

PAIRS = (CrossConnect(1, 2), CrossConnect(3, 4))
LEAVES = st.none() | st.booleans() | st.integers(-1, 70000) | st.sampled_from(
    ["1", "0", "ENABLED", "1.1.1", "1.1.2", "1.1.3", "1.1.4", "1.1.1>1.1.2", "1.1.3>1.1.4", "2018-03-22", "I-OST-2x2"]
)  # fmt: skip
NAMES = ("optical-switch:cross-connects", "pair", "ingress", "egress", "optical-switch:port-config", "port", "port-id")
MORE = ("status", "modules-state", "module", "name", "revision", "product-information", "model-name", "errors", "error")
LESS = ("error-tag", "half1", "half2", "conn", "response", "msg", "yang-patch-status", "edit-status", "edit")
KEYS = st.sampled_from([*NAMES, *MORE, *LESS])
JSON: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=10
)
PORTS = [{"port": f"1.1.{port}"} for port in range(1, 5)]
LISTED = [{"half1": {"conn": "1.1.1>1.1.2"}}, {"half1": {"conn": "1.1.3>1.1.4"}}]
BODIES = st.one_of(
    st.binary(max_size=20),
    (JSON | st.sampled_from([PORTS, LISTED, []])).map(lambda value: json.dumps(value).encode()),
)
ANSWERS = st.builds(
    DeviceResponse,
    st.sampled_from([200, 200, 200, 201, 204, 301, 401, 404, 409, 500, 503]),
    st.just({}),
    BODIES,
)


class Scripted:
    """A session that repeats the same answers."""

    def __init__(self, answers: list[DeviceResponse]) -> None:
        self._answers = answers
        self._asked = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def request(self, *words: object, **more: object) -> DeviceResponse:
        self._asked += 1
        return self._answers[self._asked % len(self._answers)]


async def failure(verb: Awaitable[object]) -> DriverError | None:
    try:
        await verb
    except DriverError as error:
        return error
    return None


async def drive(wire: SwitchWire) -> None:
    for verb in (wire.open, wire.read_facts, wire.read_ports, wire.read_circuits):
        error = await failure(verb())
        assert not isinstance(error, DriverOutcomeUnknown)
        assert str(error).isprintable()
    for action in Action:
        assert str(await failure(wire.set(action, PAIRS))).isprintable()


@given(answers=st.lists(ANSWERS, min_size=1, max_size=6), change_with=st.sampled_from(ChangeWith))
def test_restconf_verbs_survive_any_answer(answers: list[DeviceResponse], change_with: ChangeWith) -> None:
    session: Any = Scripted(answers)
    options = RestconfOptions(address="192.0.2.7", reconfiguration_s=0.0, power=True, change_with=change_with)
    wire = RestconfWire(options, SystemClock(), session)
    asyncio.run(drive(wire))


@given(answers=st.lists(ANSWERS, min_size=1, max_size=6), direction=st.sampled_from(CrossConnectDirection))
def test_calient_verbs_survive_any_answer(answers: list[DeviceResponse], direction: CrossConnectDirection) -> None:
    session: Any = Scripted(answers)
    options = CalientOptions(address="192.0.2.7", dir=direction, group="", reconfiguration_s=0.0)
    wire = CalientRestWire(options, SystemClock(), session)
    asyncio.run(drive(wire))
