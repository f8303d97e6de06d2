"""Rendered command lines, parsed by vLLM's own parser. No server is started."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from orchestrrl.core.config.launch import EngineDevice
from orchestrrl.fleet.deployers.command_line import CommandLine, EngineLaunch, EngineSpec, render
from orchestrrl.fleet.deployers.user_arguments import DECIDED, SHORT
from planner.model import ConfigurationId, EngineId, GpuId, Parallelism
from tests.vllm.conftest import VLLM_PYTHON

READER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = make_arg_parser(FlexibleArgumentParser())
names = [action.option_strings for action in parser._actions if action.option_strings]
flags = {name: next((long for long in each if long.startswith("--")), name) for each in names for name in each}
read = [vars(parser.parse_args(words)) for words in json.load(sys.stdin)]
json.dump({"flags": flags, "read": read}, sys.stdout, default=str)
"""

LAUNCH = EngineLaunch(
    python="python3",
    model="org/model",
    nodes=("10.0.0.1", "10.0.0.2", "10.0.0.3"),
    served_model_name="m",
    arguments=("--max-model-len", "4096", "--additional-config", '{"x": 1}'),
    kv_directory="/kv",
)
LAYOUTS = (
    Parallelism(tp=2),
    Parallelism(tp=16),
    Parallelism(tp=2, pp=2),
    Parallelism(tp=8, pp=2),
    Parallelism(dp=8, ep=8),
    Parallelism(dp=16, ep=16),
    Parallelism(tp=4, dp=2, ep=8),
    Parallelism(tp=16, dp=1, ep=16),
    Parallelism(attention_gpus=4, ffn_gpus=4, micro_batches=2),
    Parallelism(attention_gpus=16, ffn_gpus=8),
)


def lines() -> list[CommandLine]:
    found = []
    for layout in LAYOUTS:
        gpus = tuple(GpuId(gpu) for gpu in range(layout.gpus))
        spec = EngineSpec(EngineId("e0"), ConfigurationId("c"), layout, gpus, max_sequences=64, weights="/ckpt")
        found += render(spec, LAUNCH)
        if not layout.afd and layout.gpus <= 8:
            found += render(spec, replace(LAUNCH, device=EngineDevice.CPU))
    return found


def words(line: CommandLine) -> Sequence[str]:
    """Return the arguments for the parser. The model is the argument of `serve` or a flag."""
    return (line.program[-1:] if "serve" in line.program else ()) + line.arguments


@cache
def as_vllm_has_it() -> dict[str, Any]:
    asked = json.dumps([words(line) for line in lines()])
    done = subprocess.run([VLLM_PYTHON, "-c", READER], input=asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_vllm_parses_the_intended_values() -> None:
    for line, found in zip(lines(), as_vllm_has_it()["read"], strict=True):
        own = dict(zip(line.arguments, [*line.arguments[1:], ""], strict=True))
        for flag in (word for word in line.arguments if word.startswith("--")):
            value, text = found[flag.removeprefix("--").replace("-", "_")], own[flag]
            if text.startswith("{"):
                assert value == json.loads(text) or "KvHandover" in str(value)
            elif text.startswith("--") or not text:
                assert value is True
            elif flag == "--served-model-name":
                assert value == ["m"]
            else:
                assert str(value) == text
        assert (found["model_tag"] or found["model"]) == "/ckpt"


def test_layout_flags_cover_all_names_of_vllm() -> None:
    flags: dict[str, str] = as_vllm_has_it()["flags"]
    assert set(DECIDED) <= set(flags)
    assert {short: flags[short] for short in SHORT} == SHORT
    others = {short for short, name in flags.items() if name in DECIDED and not short.startswith("--")}
    assert others == set(SHORT)
    # The parser completes abbreviated flags, so no other flag may have such an abbreviation as its name.
    assert not [flag for flag in flags if flag not in DECIDED and any(name.startswith(flag) for name in DECIDED)]
