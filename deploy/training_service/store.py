"""Durable rows of the training service."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

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


# Database: the durable records of the service in one SQLite file.
#
# Every method is one transaction, on disk when the method returns (write-ahead log, synchronous=FULL), except `finish`:
# outcomes survive the end of the process, and after a power failure the newest are computed again. The methods run in
# one
# thread of their own.

T = TypeVar("T")


FORMAT = 2


TABLES = """
CREATE TABLE IF NOT EXISTS sessions (session_id TEXT PRIMARY KEY, tenant TEXT, created_s REAL, user_metadata TEXT,
    display_name TEXT);
CREATE TABLE IF NOT EXISTS models (model_id TEXT PRIMARY KEY, tenant TEXT, session_id TEXT, spec TEXT, created_s REAL,
    user_metadata TEXT, snapshot_seq INTEGER, snapshot TEXT, is_trainable INTEGER);
CREATE TABLE IF NOT EXISTS requests (model_id TEXT, seq_id INTEGER, kind TEXT, body BLOB, status TEXT, result BLOB,
    is_proto INTEGER, error TEXT, category TEXT, finished_s REAL, PRIMARY KEY (model_id, seq_id));
CREATE TABLE IF NOT EXISTS checkpoints (path TEXT PRIMARY KEY, model_id TEXT, tenant TEXT, kind TEXT, name TEXT,
    folder TEXT, spec TEXT, created_s REAL, num_bytes INTEGER, user_metadata TEXT, expires_s REAL, is_public INTEGER,
    is_ephemeral INTEGER);
CREATE TABLE IF NOT EXISTS samplers (sampler_id TEXT PRIMARY KEY, tenant TEXT, session_id TEXT, path TEXT,
    inflight_model TEXT, num_clones INTEGER);
CREATE TABLE IF NOT EXISTS samples (request_id TEXT PRIMARY KEY, sampler_id TEXT, body BLOB);
CREATE TABLE IF NOT EXISTS copies (idempotency_key TEXT PRIMARY KEY, path TEXT);
"""


CLEARS = (Kind.STEP, Kind.LOAD, Kind.CREATE_FROM)  # requests after which the gradient is 0


@dataclass(frozen=True)
class Position:
    """Where a model stands: its first unfinished request, its last step, and the first failed gradient since."""

    next_seq: int
    last_step: int
    failed_gradient: int | None
    queued: list[RequestRecord]


class Database:
    """Sessions, models, requests, checkpoints and samplers."""

    def __init__(self, file: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training-service-store")
        self._db = self._thread.submit(_opened, file).result()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def add_session(self, session: Session) -> None:
        await self._insert("sessions", {**asdict(session), "user_metadata": _text(session.user_metadata)})

    async def sessions(self) -> list[Session]:
        rows = await self._rows("SELECT * FROM sessions")
        return [Session(**{**row, "user_metadata": _value(row["user_metadata"])}) for row in rows]

    async def add_model(self, model: ModelRecord, first: RequestRecord | None) -> None:
        """Adds a model and its first request; does nothing if the model exists."""

        def write(db: sqlite3.Connection) -> None:
            _insert(db, "models", _model_row(model))
            if first is not None:
                _insert(db, "requests", _request_row(first))

        await self._run(write)

    async def models(self) -> list[ModelRecord]:
        rows = await self._rows("SELECT * FROM models")
        return [_model(row) for row in rows]

    async def add_request(self, request: RequestRecord) -> None:
        """Adds a request; does nothing if the model has one of this number."""
        await self._insert("requests", _request_row(request))

    async def finish(self, requests: Sequence[tuple[RequestRecord, RequestOutcome]]) -> None:
        """Writes the outcomes of requests."""
        now = time.time()

        def write(db: sqlite3.Connection) -> None:
            db.executemany(
                "UPDATE requests SET status=?, result=?, is_proto=?, error=?, category=?, finished_s=?"
                " WHERE model_id=? AND seq_id=?",
                [
                    (
                        Status.FAILED if outcome.is_failed else Status.DONE,
                        outcome.body,
                        outcome.is_proto,
                        outcome.error,
                        outcome.category,
                        now,
                        request.model_id,
                        request.seq_id,
                    )
                    for request, outcome in requests
                ],
            )

        await self._run(write, is_flushed=False)

    async def request(self, model_id: str, seq_id: int) -> RequestRecord | None:
        rows = await self._rows("SELECT * FROM requests WHERE model_id=? AND seq_id=?", model_id, seq_id)
        return _request(rows[0]) if rows else None

    async def position(self, model_id: str) -> Position:
        """Returns where a model stands."""
        rows = await self._rows(
            "SELECT seq_id, kind, status FROM requests WHERE model_id=? AND status!=?", model_id, Status.QUEUED
        )
        done = [row["seq_id"] for row in rows if row["kind"] in CLEARS and _is_done(row)]
        steps = [row["seq_id"] for row in rows if row["kind"] == Kind.STEP]  # also those that failed with the gradient
        last_clear = max([*done, *steps], default=0)
        failed = [
            row["seq_id"]
            for row in rows
            if row["kind"] == Kind.FORWARD_BACKWARD and row["status"] == Status.FAILED and row["seq_id"] > last_clear
        ]
        queued = await self._rows(
            "SELECT * FROM requests WHERE model_id=? AND status=? ORDER BY seq_id", model_id, Status.QUEUED
        )
        return Position(
            next_seq=max((row["seq_id"] + 1 for row in rows), default=0),
            last_step=max(done, default=0),
            failed_gradient=min(failed, default=None),
            queued=[_request(row) for row in queued],
        )

    async def finished_since(self, model_id: str, seq_id: int) -> list[RequestRecord]:
        """Returns the successful requests after `seq_id` in order, without those whose gradient was discarded."""
        rows = await self._rows(
            "SELECT * FROM requests WHERE model_id=? AND seq_id>? AND status=? ORDER BY seq_id",
            model_id,
            seq_id,
            Status.DONE,
        )
        return [_request(row) for row in rows]

    async def discard_gradient(self, model_id: str, after: int, before: int) -> None:
        """Marks the requests in (after, before) so that a restored model does not repeat their gradients."""

        def write(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE requests SET status=? WHERE model_id=? AND seq_id>? AND seq_id<? AND status=? AND kind=?",
                (Status.VOID, model_id, after, before, Status.DONE, Kind.FORWARD_BACKWARD),
            )

        await self._run(write)

    async def set_snapshot(
        self, model: ModelRecord, seq_id: int, folder: str, keep_results: int, keep_results_s: float
    ) -> ModelRecord:
        """Records a snapshot after request `seq_id`, and drops the bodies of the requests that it covers.

        Results stay if they are among the newest `keep_results` or younger than `keep_results_s`.
        """
        model_id, oldest_s = model.model_id, time.time() - keep_results_s

        def write(db: sqlite3.Connection) -> None:
            db.execute("UPDATE models SET snapshot_seq=?, snapshot=? WHERE model_id=?", (seq_id, folder, model_id))
            db.execute("UPDATE requests SET body=x'' WHERE model_id=? AND seq_id<=?", (model_id, seq_id))
            db.execute(
                "UPDATE requests SET result=NULL WHERE model_id=? AND seq_id<=? AND category='' AND finished_s<?",
                (model_id, seq_id - keep_results, oldest_s),
            )

        await self._run(write)
        return replace(model, snapshot_seq=seq_id, snapshot=folder)

    async def add_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Adds a checkpoint, in place of one with the same path."""
        row = {
            **asdict(checkpoint),
            "spec": _text(asdict(checkpoint.spec)),
            "user_metadata": _text(checkpoint.user_metadata),
        }
        await self._run(lambda db: _insert(db, "checkpoints", row, "REPLACE"))

    async def checkpoints(self) -> list[CheckpointRecord]:
        return [_checkpoint(row) for row in await self._rows("SELECT * FROM checkpoints ORDER BY created_s")]

    async def remove_checkpoint(self, path: str) -> None:
        await self._run(lambda db: db.execute("DELETE FROM checkpoints WHERE path=?", (path,)))

    async def add_copy(self, idempotency_key: str, path: str) -> None:
        await self._insert("copies", {"idempotency_key": idempotency_key, "path": path})

    async def copy(self, idempotency_key: str) -> str | None:
        rows = await self._rows("SELECT path FROM copies WHERE idempotency_key=?", idempotency_key)
        return str(rows[0]["path"]) if rows else None

    async def put_sampler(self, sampler: SamplingSession) -> None:
        await self._run(lambda db: _insert(db, "samplers", asdict(sampler), "REPLACE"))

    async def samplers(self) -> list[SamplingSession]:
        return [SamplingSession(**row) for row in await self._rows("SELECT * FROM samplers")]

    async def add_sample(self, sample: PendingSample) -> None:
        await self._insert("samples", asdict(sample))

    async def remove_samples(self, request_ids: Sequence[str]) -> None:
        keys = [(request_id,) for request_id in request_ids]
        await self._run(lambda db: db.executemany("DELETE FROM samples WHERE request_id=?", keys))

    async def samples(self) -> list[PendingSample]:
        return [PendingSample(**row) for row in await self._rows("SELECT * FROM samples")]

    async def _insert(self, table: str, row: dict[str, Any]) -> None:
        await self._run(lambda db: _insert(db, table, row))

    async def _rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        return await self._run(lambda db: [dict(row) for row in db.execute(query, values)])

    async def _run(self, write: Callable[[sqlite3.Connection], T], *, is_flushed: bool = True) -> T:
        def transaction() -> T:
            if not is_flushed:
                self._db.execute("PRAGMA synchronous=NORMAL")
            try:
                with self._db:
                    return write(self._db)
            finally:
                if not is_flushed:
                    self._db.execute("PRAGMA synchronous=FULL")

        return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)


def _opened(file: Path) -> sqlite3.Connection:
    file.parent.mkdir(parents=True, exist_ok=True)
    db = sqlite3.connect(file)
    db.row_factory = sqlite3.Row
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    [version] = db.execute("PRAGMA user_version").fetchone()
    if version not in (0, FORMAT):
        raise ValueError(f"{file} has format {version}, this version reads {FORMAT}: use another folder")
    db.executescript(TABLES)
    db.execute(f"PRAGMA user_version={FORMAT}")
    db.commit()
    return db


def _insert(db: sqlite3.Connection, table: str, row: dict[str, Any], conflict: str = "IGNORE") -> None:
    names, marks = ", ".join(row), ", ".join("?" * len(row))
    db.execute(f"INSERT OR {conflict} INTO {table} ({names}) VALUES ({marks})", tuple(row.values()))


def _is_done(row: dict[str, Any]) -> bool:
    return bool(row["status"] == Status.DONE)


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def _value(text: str | None) -> Any:
    return None if text is None else json.loads(text)


def _model_row(model: ModelRecord) -> dict[str, Any]:
    return {**asdict(model), "spec": _text(asdict(model.spec)), "user_metadata": _text(model.user_metadata)}


def _model(row: dict[str, Any]) -> ModelRecord:
    return ModelRecord(
        **{
            **row,
            "spec": AdapterSpec(**_value(row["spec"])),
            "user_metadata": _value(row["user_metadata"]),
            "is_trainable": bool(row["is_trainable"]),
        }
    )


def _request_row(request: RequestRecord) -> dict[str, Any]:
    return {
        "model_id": request.model_id,
        "seq_id": request.seq_id,
        "kind": request.kind,
        "body": request.body,
        "status": request.status,
    }


def _request(row: dict[str, Any]) -> RequestRecord:
    status = Status(row["status"])
    outcome = None
    if status is not Status.QUEUED and (row["category"] or row["result"] is not None):
        outcome = RequestOutcome(row["result"] or b"", bool(row["is_proto"]), row["error"], row["category"])
    return RequestRecord(row["model_id"], row["seq_id"], Kind(row["kind"]), row["body"], status, outcome)


def _checkpoint(row: dict[str, Any]) -> CheckpointRecord:
    return CheckpointRecord(
        **{
            **row,
            "spec": AdapterSpec(**_value(row["spec"])),
            "user_metadata": _value(row["user_metadata"]),
            "is_public": bool(row["is_public"]),
            "is_ephemeral": bool(row["is_ephemeral"]),
        }
    )
