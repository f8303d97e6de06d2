"""Errors of the simulated engine: OpenAI error objects, as in vLLM. The functions have no side effects."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from orchestrrl.core.errors import faults_of
from orchestrrl.engines.base import RequestRefused

Body = TypeVar("Body", bound=BaseModel)


def validated(shape: type[Body], body: Any) -> Body:
    """Return `body` as `shape`. Raises RequestRefused if it is invalid."""
    try:
        return shape.model_validate(body)
    except ValidationError as error:
        faults = faults_of(error)
        raise refusal("; ".join(faults), param=faults[0].split(":")[0], kind="Bad Request") from error


def refusal(message: str, param: str | None = None, status: int = 400, kind: str = "BadRequestError") -> RequestRefused:
    """Return a RequestRefused with an OpenAI error object. `param` names the faulty parameter, and `kind` is the type
    of the error."""
    return RequestRefused(
        message, status, {"error": {"message": message, "type": kind, "param": param, "code": status}}
    )
