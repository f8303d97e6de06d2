"""How a figure's rows are made: beside its claim, and with the reason only where it is far off."""

from orchestrrl.lab.scoreboard.claims import CLAIMS
from orchestrrl.lab.scoreboard.model import ScoreboardRow

UNKNOWN = "not known"


def compared(figure: str, what: str, claim: str, ours: float, why: str = UNKNOWN, unit: str = "x") -> ScoreboardRow:
    """`why` is dropped where the two are close. Raises KeyError for a claim that is not known."""
    row = ScoreboardRow(figure, what, CLAIMS[claim], ours, unit, why, claim)
    return row if row.is_far else ScoreboardRow(figure, what, CLAIMS[claim], ours, unit, "", claim)


def beyond(what: str, ours: float, unit: str = "x", why: str = "", figure: str = "Beyond") -> ScoreboardRow:
    """That the paper has no figure for. `why`: what there is to know about it."""
    return ScoreboardRow(figure, what, None, ours, unit, why)


def put_in(figure: str, what: str, claim: str, ours: float, why: str, unit: str = "x") -> ScoreboardRow:
    """An input here."""
    return ScoreboardRow(figure, what, CLAIMS[claim], ours, unit, why, claim, given=True)
