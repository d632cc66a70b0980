"""Common options of reward functions that call servers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from mobula.cluster.user_code import did_you_mean
from mobula.configs.schema.base import Section


class Connection(Section):
    """Servers, limits and timeouts; `of` reads them from the options of a reward function."""

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """Whole URLs of the service; requests are balanced over them."""
    max_concurrency: PositiveInt
    """Requests in flight at a time, over all URLs."""
    timeout_s: PositiveFloat
    """How long one attempt may take, from connecting to the last byte of the reply."""
    total_timeout_s: PositiveFloat
    """How long one call of the reward function may take, all its requests and their attempts together."""
    max_attempts: PositiveInt
    """How often one request is sent at most."""
    backoff_s: PositiveFloat
    """Upper end of the first random pause between two attempts; it doubles with each."""
    max_backoff_s: PositiveFloat
    """Upper bound of the pause."""
    max_request_bytes: PositiveInt
    """A larger request is split; a single sample above it is refused."""
    max_reply_bytes: PositiveInt
    """A larger reply is refused while it is read."""
    max_failures: PositiveInt
    """A URL that fails so often in a row is set aside."""
    aside_s: PositiveFloat
    """For how long."""
    token_env: str | None
    """The environment variable that holds the bearer token; null sends none."""

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any]) -> Self:
        """Reads the connection options of the reward function `name`.

        Raises:
            ValueError: an option is unknown, missing or wrong, or the token's variable is not set.
        """
        for option in options:
            if option not in cls.model_fields:
                hint = did_you_mean(option, cls.model_fields)
                raise ValueError(f"{name} has no option {option!r}{hint}: it has {', '.join(cls.model_fields)}")
        try:
            connection = cls.model_validate({**options, "urls": _as_list(options.get("urls"))})
        except ValidationError as error:
            raise ValueError("; ".join(_sentence(dict(detail)) for detail in error.errors())) from error
        connection.headers()
        return connection

    @model_validator(mode="after")
    def _check(self) -> Self:
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise ValueError(f"options.urls has {url!r}: give whole URLs, e.g. http://127.0.0.1:8000/score")
            if "@" in urlsplit(url).netloc:  # the configuration is written to the run folder
                raise ValueError(f"options.urls has credentials for {urlsplit(url).hostname}: use options.token_env")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"options.urls names one server twice ({', '.join(self.urls)}): name each once")
        if self.total_timeout_s < self.timeout_s:
            raise ValueError(
                f"options.total_timeout_s={self.total_timeout_s:g} is shorter than timeout_s={self.timeout_s:g} of one "
                "attempt: raise it"
            )
        return self

    def headers(self) -> dict[str, str]:
        """Returns the authorization header.

        Raises:
            ValueError: the variable that should hold the token is not set.
        """
        if self.token_env is None:
            return {}
        token = os.environ.get(self.token_env, "")
        if not token:
            raise ValueError(f"options.token_env={self.token_env!r} is not set in the environment: set it or use null")
        return {"Authorization": f"Bearer {token}"}


def _as_list(urls: Any) -> Any:
    """Converts a single URL to a list; otherwise it would be read as a sequence of characters."""
    return [urls] if isinstance(urls, str) else urls


def _sentence(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    name = ".".join(str(part) for part in detail["loc"])
    if detail["input"] is None or detail["type"] == "missing":
        return f"options.{name} is not set: {detail['msg']}"
    return f"options.{name} got {detail['input']!r}: {detail['msg']}"
