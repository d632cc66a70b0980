"""Errors that the service answers with.

    ServiceError(Exception)
    ├── RefusedError     the request is answered with an HTTP status; it leaves no trace
    └── RequestError     the request is accepted and its future fails, with the client's category `user`

A request of a model that has a sequence number never gets a RefusedError for its content: the client counts it, and the
model would wait for its number.
"""

from __future__ import annotations


class ServiceError(Exception):
    """Base class of the errors of the training service."""


class RefusedError(ServiceError):
    """A request that is answered with an HTTP status. The client raises the error class of this status."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class RequestError(ServiceError, ValueError):
    """A request that cannot be executed. Its future fails."""


def not_found(what: str, name: str) -> RefusedError:
    """Returns the error of an object that does not exist or belongs to another tenant."""
    return RefusedError(404, f"there is no {what} {name!r}, or it belongs to another tenant")
