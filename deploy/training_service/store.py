"""Durable records of the training service: a table for each kind of record, in one SQLite file."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from mobula.cluster.training_service.interfaces import AdapterSpec


class Kind(StrEnum):
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
    user_metadata: Mapping[str, Any] | None = None
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


@dataclass(frozen=True)
class CopyRecord:
    """The answer to a request to copy weights, for a client that sends it again."""

    idempotency_key: str
    path: str


Record = Session | ModelRecord | CheckpointRecord | SamplingSession | PendingSample | CopyRecord
R = TypeVar("R", Session, ModelRecord, CheckpointRecord, SamplingSession, PendingSample, CopyRecord)
T = TypeVar("T")

FORMAT = 2
TABLES: Mapping[type[Any], str] = {  # the first field of a record is the key of its table
    Session: "sessions",
    ModelRecord: "models",
    CheckpointRecord: "checkpoints",
    SamplingSession: "samplers",
    PendingSample: "samples",
    CopyRecord: "copies",
}
READERS: Mapping[type[Any], TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in TABLES}
JSON_COLUMNS = ("spec", "user_metadata")
REQUESTS = """CREATE TABLE IF NOT EXISTS requests (model_id TEXT, seq_id INTEGER, kind TEXT, body BLOB, status TEXT,
    result BLOB, is_proto INTEGER, error TEXT, category TEXT, finished_s REAL, PRIMARY KEY (model_id, seq_id))"""
CLEARS = (Kind.STEP, Kind.LOAD, Kind.CREATE_FROM)  # requests after which the gradient is 0


@dataclass(frozen=True)
class Position:
    """Where a model stands: its first unfinished request, its last step, and the first failed gradient since."""

    next_seq: int
    last_step: int
    failed_gradient: int | None
    queued: list[RequestRecord]


class Database:
    """Records by kind, and the requests of models.

    Every method is one transaction, on disk when the method returns (write-ahead log, synchronous=FULL), except
    `finish`: outcomes survive the end of the process, and after a power failure the newest are computed again. The
    methods run in one thread of their own.
    """

    def __init__(self, file: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="training-service-store")
        self._db = self._thread.submit(_opened, file).result()

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._db.close)
        self._thread.shutdown()

    async def add(self, *records: Record | RequestRecord) -> None:
        """Adds records; one whose key exists stays as it is."""
        await self._insert("IGNORE", records)

    async def put(self, record: Record) -> None:
        """Adds a record, in place of one with the same key."""
        await self._insert("REPLACE", [record])

    async def all(self, kind: type[R]) -> list[R]:
        return [_record(kind, row) for row in await self._rows(f"SELECT * FROM {TABLES[kind]}")]

    async def find(self, kind: type[R], key: str) -> R | None:
        rows = await self._rows(f"SELECT * FROM {TABLES[kind]} WHERE {_key(kind)}=?", key)
        return _record(kind, rows[0]) if rows else None

    async def remove(self, kind: type[Record], keys: Sequence[str]) -> None:
        query = f"DELETE FROM {TABLES[kind]} WHERE {_key(kind)}=?"
        await self._run(lambda db: db.executemany(query, [(key,) for key in keys]))

    async def finish(self, requests: Sequence[tuple[RequestRecord, RequestOutcome]]) -> None:
        now = time.time()
        values = [
            (
                Status.FAILED if outcome.is_failed else Status.DONE,
                *(outcome.body, outcome.is_proto, outcome.error, outcome.category, now),
                *(request.model_id, request.seq_id),
            )
            for request, outcome in requests
        ]
        query = (
            "UPDATE requests SET status=?, result=?, is_proto=?, error=?, category=?, finished_s=?"
            " WHERE model_id=? AND seq_id=?"
        )
        await self._run(lambda db: db.executemany(query, values), is_flushed=False)

    async def request(self, model_id: str, seq_id: int) -> RequestRecord | None:
        rows = await self._rows("SELECT * FROM requests WHERE model_id=? AND seq_id=?", model_id, seq_id)
        return _request(rows[0]) if rows else None

    async def position(self, model_id: str) -> Position:
        rows = await self._rows(
            "SELECT seq_id, kind, status FROM requests WHERE model_id=? AND status!=?", model_id, Status.QUEUED
        )
        done = [row["seq_id"] for row in rows if row["kind"] in CLEARS and row["status"] == Status.DONE]
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
        query = "UPDATE requests SET status=? WHERE model_id=? AND seq_id>? AND seq_id<? AND status=? AND kind=?"
        values = (Status.VOID, model_id, after, before, Status.DONE, Kind.FORWARD_BACKWARD)
        await self._run(lambda db: db.execute(query, values))

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

    async def _insert(self, conflict: str, records: Sequence[Record | RequestRecord]) -> None:
        def write(db: sqlite3.Connection) -> None:
            for record in records:
                table, row = TABLES.get(type(record), "requests"), _row(record)
                marks = ", ".join("?" * len(row))
                db.execute(f"INSERT OR {conflict} INTO {table} ({', '.join(row)}) VALUES ({marks})", [*row.values()])

        await self._run(write)

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
    for kind, table in TABLES.items():
        others = "".join(f", {field.name}" for field in fields(kind)[1:])
        db.execute(f"CREATE TABLE IF NOT EXISTS {table} ({_key(kind)} PRIMARY KEY{others})")
    db.execute(REQUESTS)
    db.execute(f"PRAGMA user_version={FORMAT}")
    db.commit()
    return db


def _key(kind: type[Record]) -> str:
    return fields(kind)[0].name


def _row(record: Record | RequestRecord) -> dict[str, Any]:
    row = asdict(record)
    row.pop("outcome", None)  # of a request; `finish` writes it
    return row | {name: json.dumps(row[name]) for name in JSON_COLUMNS if row.get(name) is not None}


def _record(kind: type[R], row: Mapping[str, Any]) -> R:
    texts = {name: json.loads(row[name]) for name in JSON_COLUMNS if row.get(name) is not None}
    record: R = READERS[kind].validate_python({**row, **texts})
    return record


def _request(row: dict[str, Any]) -> RequestRecord:
    status = Status(row["status"])
    outcome = None
    if status is not Status.QUEUED and (row["category"] or row["result"] is not None):
        outcome = RequestOutcome(row["result"] or b"", bool(row["is_proto"]), row["error"], row["category"])
    return RequestRecord(row["model_id"], row["seq_id"], Kind(row["kind"]), row["body"], status, outcome)
