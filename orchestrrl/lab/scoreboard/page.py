"""The scoreboard as a page of Markdown: every row with its reason, every constant with its source. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from math import isfinite

from orchestrrl.lab.scoreboard.claims import CLAIMS, FAR, Constant, PaperClaim, ScoreboardRow
from orchestrrl.lab.scoreboard.constants import ELSEWHERE, every
from orchestrrl.lab.scoreboard.run import NOT_HERE, Made, all_rows

COMMAND = "orchestrrl sim paper --write-docs docs/scoreboard.md"
HEAD = """\
# The paper's figures, and ours

Every figure that the OrchestrRL paper (arXiv 2601.01209) reports in its text, made again from first principles:
stages of a step on simulated hardware, with the planner, balancer, circuit and sync planners that the daemon has.
Nothing is fitted to a figure that it is compared with; the constants stand at the end, each with its source. A
difference is relative to the paper's figure, or to the nearer end of its range. Where it is over 15 %, the row says
why. `given` is what was put in, since it cannot be made from anything, and is not compared.

```console
$ orchestrrl sim paper --quick --figures 11,20
```

makes two of them. `orchestrrl sim paper` makes all in less than 30 minutes on two cores, `--quick` a smaller table in
less than 3. They are kept in `out/paper`, so that an interrupted run goes on where it was. `--write-docs PAGE.md`
writes a page such as this one, which is generated.
"""


def digest() -> str:
    """Of claims and constants: a page that has another one is of others."""
    text = repr(sorted((name, claim.low, claim.high) for name, claim in CLAIMS.items()))
    text += repr([(each.name, each.value, each.unit, each.source) for each in every()])
    return sha256(text.encode()).hexdigest()[:16]


def page(made: Sequence[Made]) -> str:
    parts = [HEAD.strip(), f"<!-- {COMMAND}; claims and constants: {digest()} -->", counted(all_rows(made))]
    for each in made:
        parts.append(f"## {each.title}")
        if each.quick:
            parts.append(f"Made quickly: {each.quick}.")
        parts.append(table(each.rows))
    parts += [
        "## Not made here",
        *(f"- `{name}` ({shown(CLAIMS[name], 'share')}): {why}" for name, why in NOT_HERE.items()),
    ]
    parts += ["## Constants", _constants(every())]
    parts.append("The rest stands, with its sources, in:")
    parts.append("\n".join(f"- `{where}`: {what}" for where, what in ELSEWHERE.items()))
    return "\n\n".join(parts) + "\n"


def counted(rows: Iterable[ScoreboardRow]) -> str:
    beside = [row for row in rows if row.difference is not None]
    far = [row for row in beside if row.is_far]
    return (
        f"{len(beside)} rows stand beside a figure of the paper; {len(beside) - len(far)} of them are within"
        f" {FAR:.0%}, {len(far)} are further off."
    )


def shown(claim: PaperClaim | None, unit: str) -> str:
    if claim is None:
        return ""
    if claim.low == claim.high:
        return number(claim.low, unit)
    if not isfinite(claim.low):
        return f"at most {number(claim.high, unit)}"
    if not isfinite(claim.high):
        return f"at least {number(claim.low, unit)}"
    return f"{number(claim.low, unit)} to {number(claim.high, unit)}"


def number(value: float, unit: str) -> str:
    if unit == "share":
        return f"{value:.1%}"
    if unit == "x":
        return f"{value:.2f}"
    return f"{seconds(value)}" if unit == "s" else f"{value:.4g} {unit}"


def seconds(value: float) -> str:
    if abs(value) >= 0.1 or value == 0:
        return f"{value:.3g} s" if abs(value) < 100 else f"{value:.0f} s"
    return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-4 else f"{value * 1e6:.3g} us"


def difference(row: ScoreboardRow) -> str:
    if row.given or row.difference is None:
        return "given" if row.given else ""
    return f"{row.difference:+.0%}" if abs(row.difference) < 9.995 else f"{row.difference + 1:.0f} x"


COLUMNS: Mapping[str, Callable[[ScoreboardRow], str]] = {
    "what": lambda row: row.what,
    "paper": lambda row: shown(row.paper, row.unit),
    "ours": lambda row: number(row.ours, row.unit),
    "difference": difference,
    "why": lambda row: row.why,
}


def table(rows: Sequence[ScoreboardRow]) -> str:
    return _table(tuple(COLUMNS), ([cell(row) for cell in COLUMNS.values()] for row in rows))


def _constants(constants: "Iterable[Constant[object]]") -> str:
    cells = []
    for each in constants:
        values = each.value if isinstance(each.value, tuple) else (each.value,)
        cells.append((each.name, f"{', '.join(map(_plain, values))} {each.unit}".strip(), each.source))
    return _table(("constant", "value", "source"), cells)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(map(_cell, row))} |" for row in (columns, *rows))
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def _plain(value: object) -> str:
    return f"{value:,g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
