"""Errors that the service answers with.

    ServiceError(Exception)
    ├── RefusedRequestError  the request is answered with an HTTP status; it leaves no trace
    └── RequestError         the request is accepted and its future fails, with the client's category `user`

A request of a model with a sequence number never gets a RefusedRequestError for its content: the client counts it, and
the model would wait for its number.
"""

from __future__ import annotations


class ServiceError(Exception):
    """Base class of the errors of the training service."""


class RefusedRequestError(ServiceError):
    """A request that is answered with an HTTP status. The client raises the error class of this status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class RequestError(ServiceError, ValueError):
    """A request that cannot be executed. Its future fails."""


def not_found(what: str, name: str) -> RefusedRequestError:
    """Returns the error of an object that does not exist or belongs to another tenant."""
    return RefusedRequestError(404, f"there is no {what} {name!r}, or it belongs to another tenant")
