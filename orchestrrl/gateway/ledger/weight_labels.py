"""Join the labels of weights that an engine reports for an answer's tokens with the policy versions in the ledger. The
functions perform no I/O.

vLLM's generate endpoint returns the labels at the end of an answer, as spans of tokens (`weight_versions`). An attempt
that is cut returns none, so the spans of its tokens come from the ledger. The label of a policy version is its decimal
form. The engine's spans are exact, whereas the ledger notices a change of weights late, so they correct the ledger.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from orchestrrl.gateway.ledger.ledger import PolicyVersions, VersionSpan

WEIGHT_VERSIONS = "weight_versions"  # the field of a choice
MOST_DIGITS = 18  # a longer label is not the number of a policy version

Labels = Sequence[Mapping[str, Any]]  # each has `version`, `start` and `end`; contiguous


def joined_labels(versions: PolicyVersions, start: int, labels: Labels) -> list[dict[str, Any]] | None:
    """Return the spans of the whole answer. `labels` are the spans of the last attempt, which began after `start`
    tokens. `versions` are the policy versions of the tokens before. Return None, as vLLM does for tokens without a
    label, if one of those versions is unknown."""
    before = [span for span in versions.spans(start) if span.start < start]
    if any(span.version is None for span in before):
        return None
    earlier = [{"version": str(span.version), "start": span.start, "end": min(span.end, start)} for span in before]
    later = [{**label, "start": label["start"] + start, "end": label["end"] + start} for label in labels]
    if earlier and later and earlier[-1]["version"] == later[0]["version"]:
        later[0]["start"] = earlier.pop()["start"]
    return earlier + later


def correct_versions(versions: PolicyVersions, choice_fields: Mapping[str, Any] | None) -> None:
    """Replace the policy versions of an answer by the labels in its choice fields, if all labels are policy
    versions."""
    labels: Labels = (choice_fields or {}).get(WEIGHT_VERSIONS) or ()
    if all(_is_version(label["version"]) for label in labels):
        versions.correct([VersionSpan(int(label["version"]), label["start"], label["end"]) for label in labels])


def _is_version(label: str) -> bool:
    return label.isascii() and label.isdecimal() and len(label) <= MOST_DIGITS
