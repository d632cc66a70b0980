"""ModelQueue: the unfinished requests of one model, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field

from mobula.deploy.training_service.store.records import ModelRecord, RequestRecord

NOT_LOADED = -1


@dataclass
class ModelQueue:
    """Requests run in the order of their numbers, without gaps: `next_seq` is the first that is not finished."""

    record: ModelRecord
    next_seq: int
    requests: dict[int, RequestRecord] = field(default_factory=dict)
    is_busy: bool = False
    loaded_in: int = NOT_LOADED  # incarnation of the learner that holds the adapter
    last_step: int = 0  # number of the last optimizer step
    num_steps: int = 0  # since the last snapshot
    gradient_error: str = ""  # why the gradient since the last step is not complete
    num_lost: int = 0  # times that the learner was lost while it ran the next request

    @property
    def model_id(self) -> str:
        return self.record.model_id

    @property
    def head(self) -> RequestRecord | None:
        """The request that can run now."""
        return self.requests.get(self.next_seq)

    @property
    def first_missing(self) -> int:
        """The number of the first request that has not arrived."""
        seq_id = self.next_seq
        while seq_id in self.requests:
            seq_id += 1
        return seq_id

    def computes(self) -> list[RequestRecord]:
        """The forward and forward_backward requests at the head of the queue, in order."""
        found: list[RequestRecord] = []
        while (request := self.requests.get(self.next_seq + len(found))) is not None and request.kind.is_compute:
            found.append(request)
        return found

    def pop(self, request: RequestRecord) -> None:
        """Removes the finished head."""
        assert request.seq_id == self.next_seq, f"request {request.request_id} finished before {self.next_seq}"
        del self.requests[request.seq_id]
        self.next_seq += 1
        self.num_lost = 0
