"""Merge a user's vLLM arguments with the flags of a layout and find contradictions between them, without side effects.

Flags are compared as vLLM's parser reads them: with dashes or underscores, with `=` or a space, by short name,
abbreviated as argparse allows, or negated with `--no-`.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SET, UNSET = "", "no"  # values that stand for a flag without a value: given, and negated
# The flags that a layout may decide: short name, and vLLM's default (its engine/arg_utils.py, 0.32).
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
# One-letter flags with an attached value, `-n2`, as argparse allows.
_ATTACHED = re.compile(r"(-[nr])(\d+)")
_NUMBER = re.compile(r"-\d*\.?\d+")


@dataclass(frozen=True, slots=True)
class VllmArgument:
    """One vLLM argument of a user: a flag and all values up to the next flag."""

    path: str  # its place, e.g. `fleet.launch.arguments[2]`
    flag: str  # its long name, without the part after a dot
    value: str
    arguments: tuple[str, ...]  # as given

    @property
    def key(self) -> str:
        """Return the flag's name, including the part after a dot."""
        return self.flag + "".join(self.arguments[0].partition("=")[0].partition(".")[1:])

    @property
    def dotted(self) -> bool:
        """Return whether the argument sets one key of a JSON option, as in `--some-config.key value`."""
        return self.key != self.flag

    @property
    def text(self) -> str:
        return shlex.join(self.arguments)


def read_arguments(path: str, arguments: Sequence[str]) -> tuple[list[VllmArgument], list[str]]:
    """Parse the words of a command line and return the arguments and the faults in them. Words before the first flag
    are faults. Faults quote `path`, the place of the words in the configuration file."""
    starts = [place for place, word in enumerate(arguments) if _is_flag(word)]
    faults = [
        f"{path}[{place}]: must begin with a flag such as --max-model-len, got {word!r}"
        for place, word in enumerate(arguments[: starts[0] if starts else len(arguments)])
    ]
    spans = pairwise([*starts, len(arguments)])
    return [_argument(f"{path}[{start}]", tuple(arguments[start:end])) for start, end in spans], faults


def replaced(earlier: Sequence[VllmArgument], later: Sequence[VllmArgument]) -> list[VllmArgument]:
    """Merge two lists of arguments and return the result. If a flag is in both lists, the argument in `later` replaces
    the argument in `earlier`."""
    again = {argument.key for argument in later}
    return [*(argument for argument in earlier if argument.key not in again), *later]


@dataclass(frozen=True, slots=True)
class OwnedFlags:
    """The flags that a layout decides, with their values. If the layout omits a flag that it may decide, a user may
    give this flag only with vLLM's default value."""

    values: Mapping[str, str]
    elsewhere: Mapping[str, str]  # decided by other means than flags: the model after `serve`
    defaults: Mapping[str, str | None]  # vLLM's, of all flags that a layout may decide; None: no default
    by: str  # the layout's name, for messages

    def merge(self, given: Iterable[VllmArgument], usual: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Return the words of a command line, and the faults of the user's arguments in `given`. Each flag that the
        layout decides, and each default flag in `usual`, occurs once. A user's argument replaces a flag in `usual`. A
        user's argument is dropped if it repeats a decided flag, and is a fault if it contradicts one."""
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
            return f"{self.by}, which does not set {flag}"
        return f"`{f'{flag} {value}'.strip()}` of {self.by}"


def _resolve(argument: VllmArgument, known: Collection[str]) -> tuple[str | None, str]:
    """Return the flag in `known` that the argument refers to (None if there is no such flag) and the argument's
    value."""
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
