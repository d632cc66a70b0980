"""The records of the service's database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mobula.cluster.training_service.interfaces import AdapterSpec


class Kind(StrEnum):
    """What a request of a model does."""

    CREATE = "create"
    CREATE_FROM = "create_from"  # a new model with the weights of a checkpoint
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    STEP = "step"
    LOAD = "load"
    SAVE = "save"
    SAVE_SAMPLER = "save_sampler"
    SAVE_EXTERNAL = "save_external"

    @property
    def is_compute(self) -> bool:
        """Whether requests of several models run in one call of the learner."""
        return self in (Kind.FORWARD, Kind.FORWARD_BACKWARD)


class Status(StrEnum):
    """State of a request. The gradient of a VOID request was discarded; its result stays."""

    QUEUED = "queued"
    DONE = "done"
    FAILED = "failed"
    VOID = "void"


@dataclass(frozen=True)
class Session:
    """One client program."""

    session_id: str
    tenant: str
    created_s: float
    user_metadata: Mapping[str, Any] | None = None
    display_name: str | None = None


@dataclass(frozen=True)
class ModelRecord:
    """One adapter and the point from which it can be restored: a snapshot after request `snapshot_seq`."""

    model_id: str
    tenant: str
    session_id: str
    spec: AdapterSpec
    created_s: float
    user_metadata: Mapping[str, Any] | None = None
    snapshot_seq: int = -1  # -1: no snapshot; the adapter is created from its spec
    snapshot: str = ""  # folder
    is_trainable: bool = True  # false for the run that holds a copied checkpoint


@dataclass(frozen=True)
class RequestOutcome:
    """The result of a request as the client receives it. `error` and `category` are set for a failed one."""

    body: bytes = b""
    is_proto: bool = False
    error: str = ""
    category: str = ""  # user | server

    @property
    def is_failed(self) -> bool:
        return bool(self.category)


@dataclass(frozen=True)
class RequestRecord:
    """One request of a model. `body` is the message of the client; empty once a snapshot covers it."""

    model_id: str
    seq_id: int
    kind: Kind
    body: bytes
    status: Status = Status.QUEUED
    outcome: RequestOutcome | None = None

    @property
    def request_id(self) -> str:
        return f"{self.model_id}:{self.seq_id}"


@dataclass(frozen=True)
class CheckpointRecord:
    """Saved weights. `kind` is the middle part of the path: weights, sampler_weights or external_weights."""

    path: str  # tinker://<model>/<kind>/<name>
    model_id: str
    tenant: str
    kind: str
    name: str
    folder: str
    spec: AdapterSpec
    created_s: float
    num_bytes: int
    user_metadata: Mapping[str, str] | None = None
    expires_s: float | None = None
    is_public: bool = False
    is_ephemeral: bool = False  # made for one sampling session; not listed


@dataclass(frozen=True)
class SamplingSession:
    """A sampling session: fixed weights, the base model, or the newest in-flight weights of a model."""

    sampler_id: str
    tenant: str
    session_id: str
    path: str | None = None  # of the checkpoint; None: the base model
    inflight_model: str | None = None
    num_clones: int = 0


@dataclass(frozen=True)
class PendingSample:
    """A sampling request that is not finished; it is sampled again after a restart."""

    request_id: str
    sampler_id: str
    body: bytes
