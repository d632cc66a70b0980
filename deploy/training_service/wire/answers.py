"""JSON messages of training requests other than forward and forward_backward."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeVar

import tinker.types as tk
from pydantic import BaseModel, ValidationError

from mobula.cluster.training_service.interfaces import AdamParameters
from mobula.deploy.training_service.errors import RequestError
from mobula.deploy.training_service.store.records import RequestOutcome

MAX_INTEGER = 2**53  # of the database and of all JSON parsers
M = TypeVar("M", bound=BaseModel)


class WeightsBody(BaseModel):
    tinker_path: str


class TtlBody(BaseModel):
    ttl_seconds: int | None = None


def parsed(model: type[M], body: bytes) -> M:
    """Returns the message in `body`.

    Raises:
        RequestError: it has other fields or values.
    """
    try:
        message = model.model_validate_json(body)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:4])
        raise RequestError(f"{model.__name__}: {problems}") from error
    if large := [name for name, value in message if isinstance(value, int) and abs(value) > MAX_INTEGER]:
        raise RequestError(f"{model.__name__}: {', '.join(large)}: at most {MAX_INTEGER} is allowed")
    return message


def json_outcome(**fields: object) -> RequestOutcome:
    return RequestOutcome(json.dumps({name: value for name, value in fields.items() if value is not None}).encode())


def read_adam(body: bytes) -> AdamParameters:
    """Returns the settings of a step.

    Raises:
        RequestError: another optimizer, or a value out of range.
    """
    params = parsed(tk.OptimStepRequest, body).optim_params
    if not isinstance(params, tk.AdamParams):
        raise RequestError(f"optimizer {params.type!r} is not supported: send AdamParams")
    values = params.model_dump()
    is_fit = all(math.isfinite(value) and value >= 0 for value in values.values())
    if not (is_fit and params.beta1 < 1 and params.beta2 < 1):
        raise RequestError(f"{params!r}: every value is a number from 0, beta1 and beta2 are below 1")
    return AdamParameters(**values)


def read_load(body: bytes) -> tuple[str, bool]:
    """Returns the checkpoint's path, and whether the optimizer's state is loaded."""
    request = parsed(tk.LoadWeightsRequest, body)
    return request.path, request.optimizer


def created(model_id: str) -> RequestOutcome:
    return json_outcome(type="create_model", model_id=model_id)


def stepped(metrics: Mapping[str, float]) -> RequestOutcome:
    """Metrics that are not finite are left out: JSON has no such numbers."""
    return json_outcome(metrics={name: float(value) for name, value in metrics.items() if math.isfinite(value)})


def loaded(path: str, model_id: str) -> RequestOutcome:
    return json_outcome(type="load_weights", path=path, model_id=model_id)
