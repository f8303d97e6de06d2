"""A user's own vLLM arguments beside those of a layout: who wins, and what contradicts. Pure.

Flags are compared as vLLM's parser reads them: with dashes or underscores, `=` or a space, by their short names, cut
short as argparse allows, negated with `--no-`.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SET, UNSET = "", "no"  # the values of a flag without one
# What a layout may decide: its short name, and what vLLM does where it is left out (its engine/arg_utils.py, 0.32).
_LAYOUT: Mapping[str, tuple[str | None, str | None]] = {
    "--model": (None, None),
    "--host": (None, None),
    "--port": (None, None),
    "--uds": (None, None),
    "--tensor-parallel-size": ("-tp", "1"),
    "--pipeline-parallel-size": ("-pp", "1"),
    "--prefill-context-parallel-size": ("-pcp", "1"),
    "--data-parallel-size": ("-dp", "1"),
    "--data-parallel-size-local": ("-dpl", None),
    "--data-parallel-start-rank": ("-dpr", None),
    "--data-parallel-rank": ("-dpn", None),
    "--data-parallel-address": ("-dpa", None),
    "--data-parallel-rpc-port": ("-dpp", None),
    "--data-parallel-backend": ("-dpb", "mp"),
    "--data-parallel-external-lb": ("-dpe", UNSET),
    "--data-parallel-hybrid-lb": ("-dph", UNSET),
    "--data-parallel-multi-port-external-lb": ("-dpm", UNSET),
    "--enable-expert-parallel": ("-ep", UNSET),
    "--nnodes": ("-n", "1"),
    "--node-rank": ("-r", "0"),
    "--master-addr": (None, None),
    "--master-port": (None, None),
    "--headless": (None, UNSET),
    "--api-server-count": ("-asc", "1"),
}
SHORT = {short: flag for flag, (short, _) in _LAYOUT.items() if short is not None}
DECIDED = {flag: default for flag, (_, default) in _LAYOUT.items()}
# Flags with a value right behind them, `-n2`, as argparse allows for one letter.
_ATTACHED = re.compile(r"(-[nr])(\d+)")
_NUMBER = re.compile(r"-\d*\.?\d+")


@dataclass(frozen=True, slots=True)
class VllmArgument:
    """One of a user's arguments: a flag with what follows it until the next flag."""

    path: str  # where it stands, e.g. `fleet.launch.arguments[2]`
    flag: str  # its long name; what stands behind a dot is left out
    value: str
    arguments: tuple[str, ...]  # as given

    @property
    def key(self) -> str:
        """The flag, with what stands behind a dot."""
        return self.flag + "".join(self.arguments[0].partition("=")[0].partition(".")[1:])

    @property
    def dotted(self) -> bool:
        """`--some-config.key value`: a part of what else is given as one JSON object."""
        return self.key != self.flag

    @property
    def text(self) -> str:
        return shlex.join(self.arguments)


def read_arguments(path: str, arguments: Sequence[str]) -> tuple[list[VllmArgument], list[str]]:
    """The arguments in a list of words, and faults: words in front of the first flag belong to none."""
    starts = [place for place, word in enumerate(arguments) if _is_flag(word)]
    faults = [
        f"{path}[{place}]: must begin with a flag such as --max-model-len, got {word!r}"
        for place, word in enumerate(arguments[: starts[0] if starts else len(arguments)])
    ]
    spans = pairwise([*starts, len(arguments)])
    return [_argument(f"{path}[{start}]", tuple(arguments[start:end])) for start, end in spans], faults


def replaced(earlier: Sequence[VllmArgument], later: Sequence[VllmArgument]) -> list[VllmArgument]:
    """Both lists; where they name the same flag, the later one has it."""
    again = {argument.key for argument in later}
    return [*(argument for argument in earlier if argument.key not in again), *later]


@dataclass(frozen=True, slots=True)
class OwnedFlags:
    """Flags that a layout decides, with their values; where it leaves one out, only vLLM's default agrees with it."""

    values: Mapping[str, str]
    elsewhere: Mapping[str, str]  # decided too, but where they are not said as flags: the model behind `serve`
    defaults: Mapping[str, str | None]  # of all flags that a layout may decide; None: there is none to repeat
    by: str  # who decides, for people

    def merge(self, given: Iterable[VllmArgument], usual: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """The words of a command line, each decided and each `usual` flag once, and faults. A user's argument takes the
        place of a usual one; one that repeats what is decided is left out; one that contradicts it is a fault."""
        own: list[VllmArgument] = []
        faults: list[str] = []
        known = {**self.defaults, **self.elsewhere, **self.values}
        for argument in given:
            flag, value = _resolve(argument, known)
            if flag is None:
                own.append(argument)
            elif argument.dotted or value != known[flag]:
                faults.append(f"{argument.path}: contradicts {self._decided(flag)}, got {argument.text!r}")
        taken = {argument.flag for argument in own}
        ours = {**self.values, **{flag: value for flag, value in usual.items() if flag not in taken}}
        words = [word for flag, value in ours.items() for word in (flag, value) if word != SET]
        return [*words, *(word for argument in own for word in argument.arguments)], faults

    def _decided(self, flag: str) -> str:
        value = {**self.elsewhere, **self.values}.get(flag)
        if value is None:
            return f"{self.by}, which leaves {flag} out"
        return f"`{f'{flag} {value}'.strip()}` of {self.by}"


def _resolve(argument: VllmArgument, known: Collection[str]) -> tuple[str | None, str]:
    """Which of the known flags the argument means, if any, and its value."""
    name, value = argument.flag, argument.value
    if name not in known and name.startswith("--no-"):
        name, value = "--" + name.removeprefix("--no-"), UNSET
    if name in known:
        return name, value
    cut = sorted(flag for flag in known if flag.startswith(name) and len(name) > len("--x"))
    return (cut[0] if cut else None), value


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _NUMBER.fullmatch(word)


def _argument(path: str, arguments: tuple[str, ...]) -> VllmArgument:
    name, equals, value = arguments[0].partition("=")
    attached = _ATTACHED.fullmatch(name)
    if attached is not None:
        name, value = attached.groups()
    elif not equals:
        value = " ".join(arguments[1:])
    name = SHORT.get(name, name).partition(".")[0]
    flag = "--" + name.removeprefix("--").replace("_", "-") if name.startswith("--") else name
    return VllmArgument(path, flag, value, arguments)
