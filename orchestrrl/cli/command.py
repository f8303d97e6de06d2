"""Decorators that turn functions into commands with `--json`, and functions with which commands call the daemon."""

import functools
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from orchestrrl.cli.lazy import ControlClient
from orchestrrl.cli.output import Output, print_json, print_line, raise_faults
from orchestrrl.cli.running import until_stopped
from orchestrrl.core.addresses import DEFAULT_TARGET, check_url, parse_address, remote_fault
from orchestrrl.core.errors import Permanent
from orchestrrl.rpc.plain_values import plain

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message


P = ParamSpec("P")
Flags = TypeVar("Flags")
Result = TypeVar("Result")
Request = TypeVar("Request")
Response = TypeVar("Response", bound="Message")
Command = Callable[..., None]

DAEMON_VARIABLE = "ORCHESTRRL_DAEMON"

DaemonOption = Annotated[
    str,
    typer.Option("--daemon", envvar=DAEMON_VARIABLE, metavar="ADDRESS", help="Daemon address: HOST:PORT or unix:PATH."),
]
EngineOption = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="[ID=]URL", help="An engine. Can be repeated. Default id: the URL's HOST:PORT."),
]
EngineKindOption = Annotated[
    str, typer.Option("--engine-kind", metavar="KIND", help="The engines' product: vllm or simulated.")
]
AllowRemoteFlag = Annotated[
    bool,
    typer.Option("--allow-remote", help="Allow addresses other than loopback. There is no authentication yet."),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
ProblemFile = Annotated[str, typer.Argument(metavar="FILE.json", help="The problem. - reads standard input.")]
Reason = Annotated[str, typer.Option("--reason", help="The reason, recorded in the journal.")]
TimeToLive = Annotated[float, typer.Option("--ttl-s", help="Expire after this many seconds. 0: never.")]


def with_flags(flags: type[Flags]) -> Callable[[Callable[[Flags], Result]], Callable[..., Result]]:
    """Return a decorator for functions whose only parameter is an instance of the dataclass `flags`. It replaces this
    parameter with one parameter for each field of the class."""

    def decorate(function: Callable[[Flags], Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def wrapped(**values: Any) -> Result:
            return function(flags(**values))

        set_signature(wrapped, inspect.signature(flags).parameters.values())
        return wrapped

    return decorate


def command(function: Callable[P, Output]) -> Command:
    """Turn a function that returns its output into a command with the option --json."""
    return _command(function, lambda call, as_json: call().emit(as_json))


def problem_command(example: str) -> Callable[[Callable[P, Output]], Command]:
    """Return a decorator that turns a function into a command with the options --json and --print-example. The function
    reads a problem from a file and solves it. `example` is the name of the example to print, a file in
    `orchestrrl/cli/examples`."""

    def print_example(wanted: bool) -> None:
        if wanted:
            print_json(read_example(example))
            raise typer.Exit

    text = "Print an example problem and exit."
    option = typer.Option("--print-example", help=text, callback=print_example, is_eager=True)

    def decorate(function: Callable[P, Output]) -> Command:
        def run(call: Callable[[], Output], as_json: bool, print_example: bool) -> None:
            call().emit(as_json)

        return _command(function, run, print_example=(Annotated[bool, option], False))

    return decorate


def read_example(name: str) -> Any:
    return json.loads(files("orchestrrl.cli").joinpath("examples", f"{name}.json").read_text("utf-8"))


def daemon_command(function: Callable[Concatenate[ControlClient, P], Coroutine[Any, Any, Output]]) -> Command:
    """Turn a coroutine function that calls the daemon into a command with the options --daemon and --json."""

    def run(call: Callable[[ControlClient], Coroutine[Any, Any, Output]], as_json: bool, daemon: str) -> None:
        call_daemon(daemon, call).emit(as_json)

    return _command(function, run, daemon=(DaemonOption, DEFAULT_TARGET))


Stream = Callable[Concatenate[ControlClient, P], AsyncIterator[dict[str, Any]]]


def stream_command(line: Callable[[dict[str, Any]], str]) -> Callable[[Stream[P]], Command]:
    """Return a decorator that turns a function into a command. The function streams objects from the daemon. The
    command prints one line per object, formatted by `line`, until the stream ends or the operator stops the command."""

    def decorate(function: Stream[P]) -> Command:
        def run(call: Callable[[ControlClient], AsyncIterator[dict[str, Any]]], as_json: bool, daemon: str) -> None:
            async def print_each(client: ControlClient) -> None:
                async for each in call(client):
                    print_line(json.dumps(each) if as_json else line(each))

            follow(daemon, print_each)

        return _command(function, run, daemon=(DaemonOption, DEFAULT_TARGET))

    return decorate


def _command(function: Callable[..., Any], run: Command, **added: tuple[Any, object]) -> Command:
    """Return a function for Typer. Its parameters are those of `function` except the daemon's client, those in `added`,
    each given as (annotation, default), and `as_json`. It binds the arguments of `function`, and calls `run` with the
    bound function, `as_json` and the arguments in `added`."""
    own = dict(inspect.signature(function).parameters)
    own.pop("client", None)
    wants_json = "as_json" in own
    parameters = {name: parameter for name, parameter in own.items() if name != "as_json"}
    for name, (annotation, default) in {**added, "as_json": (JsonFlag, False)}.items():
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters[name] = inspect.Parameter(name, keyword, default=default, annotation=annotation)

    @functools.wraps(function)
    def wrapped(**values: Any) -> None:
        of_run = {name: values.pop(name) for name in added}
        as_json = values["as_json"] if wants_json else values.pop("as_json")
        run(functools.partial(function, **values), as_json, **of_run)

    set_signature(wrapped, parameters.values())
    return wrapped


def set_signature(function: Callable[..., Any], parameters: Iterable[inspect.Parameter]) -> None:
    """Replace the signature and the annotations of a function, which Typer reads."""
    signature = inspect.Signature(list(parameters))
    vars(function)["__signature__"] = signature
    function.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}


def address_faults(address: str) -> list[str]:
    """Return a list with an error message if the value of --daemon is malformed. Otherwise, return an empty list."""
    if address.startswith("unix:"):
        return [] if address.removeprefix("unix:") else [f"--daemon: must be unix:PATH with a path, got {address!r}"]
    try:
        parse_address(address)
    except ValueError as error:
        return [f"--daemon: {error}, or unix:PATH, got {address!r}"]
    return []


def url_faults(option: str, url: str) -> list[str]:
    """Return a list with an error message if an engine's URL is malformed. Otherwise, return an empty list."""
    try:
        check_url(url)
    except ValueError as error:
        return [f"{option}: {error}, got {url!r}"]
    return []


def engine_kind_faults(kind: str) -> list[str]:
    """Return a list with an error message if no client for engines of this product can be loaded. Otherwise, return an
    empty list."""
    from orchestrrl.engines.base import ENGINES

    try:
        ENGINES.load(kind)
    except Permanent as error:
        return [f"--engine-kind: {error}"]
    return []


def listen_address(option: str, address: str, allow_remote: bool, faults: list[str]) -> tuple[str, int]:
    """Return the host and port to listen on. Errors are appended to `faults`. Unless `allow_remote` is True, an address
    that other hosts can reach is an error."""
    try:
        host, port = parse_address(address)
    except ValueError as error:
        faults.append(f"{option}: {error}, got {address!r}")
        return "127.0.0.1", 0
    if not allow_remote and (fault := remote_fault(host, "add --allow-remote")):
        faults.append(f"{option}: {fault}, got {address!r}")
    return host, port


def call_daemon(address: str, conversation: Callable[[ControlClient], Awaitable[Result]]) -> Result:
    """Connect to the daemon and return the result of `conversation`. Raises OrchestrRLError if the daemon cannot be
    reached or a call fails."""
    import asyncio

    return asyncio.run(_converse(address, conversation))


def follow(address: str, conversation: Callable[[ControlClient], Awaitable[None]]) -> None:
    """Connect to the daemon and run `conversation` until it ends or the operator stops the command. Raises
    OrchestrRLError if the daemon cannot be reached or a call fails."""
    until_stopped(_converse(address, conversation))


async def _converse(address: str, conversation: Callable[[ControlClient], Awaitable[Result]]) -> Result:
    from orchestrrl.rpc import control_client

    raise_faults(address_faults(address))
    async with control_client.ControlClient(address) as client:
        return await conversation(client)


async def answer(
    client: ControlClient,
    method: "grpc.aio.UnaryUnaryMultiCallable[Request, Response]",
    request: Request,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Send one request to the daemon and return its response as plain Python values."""
    response = await client.call(method, request, timeout_s)
    return plain(response)
