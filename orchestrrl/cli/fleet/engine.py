"""`orchestrrl engine`: run the engines that come with OrchestrRL."""

import ast
import inspect
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrrl.cli.command import set_signature
from orchestrrl.cli.garbage import keep_loaded
from orchestrrl.cli.running import until_stopped
from orchestrrl.core.errors import Permanent, ProblemFaults, faults_of

if TYPE_CHECKING:
    from orchestrrl.lab.simulated_engine.options import SimulatedOptions

FLAGS = {"max_model_len_tokens": "max-model-len"}  # field name to option name, where they differ


def simulated(
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 selects a free port.")] = 0,
    lengths: Annotated[
        Path | None, typer.Option(help="YAML file with quantiles, tokens and correlation of response lengths.")
    ] = None,
    misreport: Annotated[
        list[str] | None,
        typer.Option(metavar="tp|pp|dp|ep=N", help="Fault: report this parallelism instead. Can be repeated."),
    ] = None,
    **given: Any,
) -> None:
    """Serve a simulated engine with vLLM's HTTP API until SIGTERM. The first line of output is the engine's URL.

    A decode step takes `alpha + beta*sequences + gamma*kv_tokens` virtual seconds. Tokens depend only on the prompt and
    the seeds, so that a request continued on another engine can be checked token by token.

    Example: `orchestrrl engine simulated --port 8100 --speed 30 --max-num-seqs 48`
    """
    # Imported here so that help and completion are fast.
    from pydantic import ValidationError

    from orchestrrl.lab.simulated_engine.options import SimulatedOptions

    given["misreport"] = {name: value for name, _, value in (text.partition("=") for text in misreport or ())}
    if lengths is not None:
        given["lengths"] = _read_yaml(lengths)
    try:
        options = SimulatedOptions.model_validate(given)
    except ValidationError as error:
        raise ProblemFaults(faults_of(error, SimulatedOptions)) from error
    keep_loaded()
    until_stopped(_serve(options, host, port))


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of `simulated`, and a parameter for each field of SimulatedOptions that has a description.
    The fields are read from the source file, so that help and completion do not import pydantic."""
    yield from (each for each in inspect.signature(simulated).parameters.values() if each.name != "given")
    module = ast.parse(files("orchestrrl.lab.simulated_engine").joinpath("options.py").read_text("utf-8"))
    model = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "SimulatedOptions")
    kinds: dict[str, Any] = {"float | None": float | None, "Path | None": Path | None, "tuple[int, ...]": list[int]}
    kinds |= {kind.__name__: kind for kind in (str, int, float, bool)}
    for field in model.body:
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.value, ast.Call):
            continue
        given = {each.arg: each.value for each in field.value.keywords}
        if "description" not in given:
            continue
        name = ast.unparse(field.target)
        flag = f"--{FLAGS.get(name, name.replace('_', '-'))}"
        option = typer.Option(flag, help=ast.literal_eval(given["description"]))
        annotation, default = kinds[ast.unparse(field.annotation)], ast.literal_eval(given["default"])
        keyword = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, keyword, default=default, annotation=Annotated[annotation, option])


set_signature(simulated, _parameters())


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProblemFaults([f"lengths: cannot read {path}: {error}"]) from error


async def _serve(options: "SimulatedOptions", host: str, port: int) -> None:
    import asyncio

    from orchestrrl.lab.simulated_engine.server import SimulatedServer

    try:
        async with SimulatedServer(options, host=host, port=port) as server:
            typer.echo(server.url)
            await asyncio.Event().wait()
    except OSError as error:
        raise Permanent(f"cannot listen on {host}:{port}: {error}") from error
