"""The `{queries, prompts, references, images} -> {rewards}` protocol of LightRFT's remote reward models, both ways."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from mobula.cluster.errors import RewardError
from mobula.cluster.records.trajectory import Response
from mobula.rewards.contract import FailureKind, RewardRequest, ScoringFailure
from mobula.rewards.http.wire import WireModel, decode_base64, encode_base64
from mobula.rewards.markers import without_markers
from mobula.rewards.pictures import portable_picture

QueryForm = Literal["full", "response"]


class LightrftBody(WireModel):
    """A request in columns, a row a sample; what else a client of that protocol sends is not looked at."""

    model_config = ConfigDict(extra="ignore")

    queries: Annotated[list[str], Field(min_length=1)]
    """Prompt and response as they were decoded, special tokens and padding included; or the response alone."""
    prompts: list[str] | None = None
    """The prompts as they stand in the queries."""
    references: list[str | list[str] | None] | None = None
    images: list[str | list[str] | None] | None = None
    """Each sample's pictures, base64 files or data URLs; a single one may stand for itself."""

    def requests(self, queries_are: QueryForm) -> list[RewardRequest]:
        """One request a query; only what follows its prompt is its response.

        Raises:
            RewardError: columns differ in length, or a sample is unfit; the message names it.
        """
        for name, column in self._columns().items():
            if column is not None and len(column) != len(self.queries):
                raise RewardError(f"{name} has {len(column)} rows for {len(self.queries)} queries: send one each")
        return [self._request(row, queries_are) for row in range(len(self.queries))]

    def _columns(self) -> dict[str, Sequence[Any] | None]:
        return {"prompts": self.prompts, "references": self.references, "images": self.images}

    def _request(self, row: int, queries_are: QueryForm) -> RewardRequest:
        columns = {name: column[row] if column else None for name, column in self._columns().items()}
        prompt = without_markers(columns["prompts"] or "")
        text = without_markers(self.queries[row])
        if queries_are == "full":
            if self.prompts is None or not text.startswith(prompt):
                raise RewardError(
                    f"sample {row}: its query does not begin with its prompt, so where its response begins is unknown: "
                    "send the prompt as it was decoded, or responses alone with ?queries=response"
                )
            text = without_markers(text[len(prompt) :])
        references = columns["references"] or []
        references = (references,) if isinstance(references, str) else tuple(references)
        # The protocol has no length, so a response is as long as it has words.
        response = Response(text.strip(), num_tokens=len(text.split()), is_truncated=False)
        return RewardRequest(response, references, {}, prompt, _pictures(columns["images"], row))


class LightrftReply(WireModel):
    """A reply: a number each, and no way to say that there is none."""

    rewards: list[FiniteFloat]


class LightrftReplyOfAnybody(BaseModel):
    """A reply as it may come: what else stands in it is not ours, and each reward is looked at by itself."""

    rewards: list[Any]

    def outcomes(self) -> list[float | ScoringFailure]:
        return [_outcome(reward) for reward in self.rewards]


class ColumnRow:
    """One request as its rows of the columns, encoded, so that its size is known."""

    def __init__(self, request: RewardRequest, queries_are: QueryForm) -> None:
        if request.response.pictures:
            raise RewardError("this protocol has no place for generated pictures: use dialect mobula")
        prompt = request.prompt_text
        images = []
        for number, picture in enumerate(request.prompt_pictures, start=1):
            _, file = portable_picture(picture, f"picture {number} of the prompt")
            images.append(encode_base64(file))
        query = prompt + request.response.text if queries_are == "full" else request.response.text
        values = {"queries": query, "prompts": prompt, "references": list(request.references), "images": images}
        self.columns = {name: json.dumps(value).encode() for name, value in values.items()}

    def __len__(self) -> int:
        return sum(len(value) for value in self.columns.values())


def join_rows(rows: Sequence[ColumnRow]) -> bytes:
    """Rows as one request body."""
    columns = (b'"%b":[%b]' % (name.encode(), b",".join(row.columns[name] for row in rows)) for name in rows[0].columns)
    return b"{" + b",".join(columns) + b"}"


def _outcome(reward: Any) -> float | ScoringFailure:
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        return ScoringFailure(FailureKind.FAILED, f"the service replied with {reward!r} for a reward")
    return reward  # the contract refuses what is not finite


def _pictures(images: str | list[str] | None, row: int) -> tuple[bytes, ...]:
    files = [images] if isinstance(images, str) else images or []
    try:
        return tuple(decode_base64(f.partition(";base64,")[2] if f.startswith("data:") else f) for f in files)
    except ValueError as error:
        raise RewardError(f"sample {row}: a picture is {error}: send base64 of whole files") from error
