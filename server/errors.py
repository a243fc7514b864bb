"""Errors of the front end, named by whose fault they are. Each knows its HTTP status, OpenAI error type and code.

ServerError
├── RequestError (ValueError)     the client's fault: 400
│   ├── ContextLengthError            it does not fit the model's context
│   ├── AuthenticationError           401 + WWW-Authenticate
│   ├── PermissionDeniedError         403: not for a page of that site, or not under that name
│   ├── NotFoundError                 404
│   │   └── ModelNotFoundError            the model is not one of those that are served
│   ├── MethodNotAllowedError         405
│   └── BodyTooLargeError             413
├── OverloadedError               503 + Retry-After
├── ConcurrencyLimitError         one API key has too many requests open: 429 + Retry-After
├── ConflictError                 not in the state that the engine is in now: 409
├── DeadlineError                 there is no answer by the request's deadline: 408
├── EngineCallError               the engine could not carry out an order, or in time: 500
├── EngineGenerateError           one request failed in the engine; the others go on: 500
├── EngineDeadError               the engine process is gone: 503
├── ShuttingDownError             the server is draining: 503
├── ClientGoneError               nobody reads the response any more: 499
└── StartupError                  the server cannot start; the CLI prints it and exits with 2
"""

import reprlib
from typing import Literal

# What `error.code` may be beside null: those of OpenAI's that clients look for. docs/conformance.md says when each is.
ErrorCode = Literal[
    "context_length_exceeded", "invalid_api_key", "model_not_found", "rate_limit_exceeded", "server_error"
]  # fmt: skip

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 3


def shown(value: object) -> str:
    """Return a value for a message: short, and quick to make however large it is."""
    return _REPR.repr(value)


class ServerError(Exception):
    """Base of every error that this package raises.

    Attributes:
        status: HTTP status.
        type: OpenAI's `error.type`.
        code: OpenAI's `error.code`; None: there is nothing to know beside the status and the type.
        param: Name of the request field at fault, or None.
        retry_after_s: Value of a Retry-After header, or None.
    """

    status = 500
    type = "InternalServerError"
    code: ErrorCode | None = "server_error"
    retry_after_s: int | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, object]:
        """Return the OpenAI error object, the same shape for every error."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


class RequestError(ServerError, ValueError):
    """The request is wrong; the message names the field, its value and the remedy."""

    status = 400
    type = "BadRequestError"
    code: ErrorCode | None = None


def check_field(is_valid: bool, name: str, value: object, rule: str) -> None:
    """Return if a request's field is valid.

    Raises:
        RequestError: Naming it, its value and the rule.
    """
    if not is_valid:
        raise RequestError(f"{name} is {shown(value)}: {rule}", param=name)


class ContextLengthError(RequestError):
    """The request does not fit the model's context: clients go to another model, or compact their conversation.

    Some know it by the code, some by the words that the message begins with, some (LangChain) by the code's name in it.
    """

    code = "context_length_exceeded"

    @classmethod
    def of(cls, num_tokens: int, problem: str, *, param: str) -> "ContextLengthError":
        """Return the error of a field that does not fit `num_tokens`; `problem` names it and ends with the remedy."""
        limit = f"This model's maximum context length is {num_tokens} tokens"
        return cls(f"{limit}. However, {problem} ({cls.code})", param=param)


class AuthenticationError(RequestError):
    """The request carries no API key, or a wrong one."""

    status = 401
    type = "AuthenticationError"
    code = "invalid_api_key"


class PermissionDeniedError(RequestError):
    """A browser sends the request for a page that may not use the server."""

    status = 403
    type = "PermissionDeniedError"


class NotFoundError(RequestError):
    """There is no such route, response or adapter."""

    status = 404
    type = "NotFoundError"


class ModelNotFoundError(NotFoundError):
    """The request is for a model that is not served."""

    code = "model_not_found"


class MethodNotAllowedError(RequestError):
    """The route exists, for other methods."""

    status = 405
    type = "MethodNotAllowedError"


class BodyTooLargeError(RequestError):
    """The request body exceeds the limit."""

    status = 413
    type = "RequestEntityTooLargeError"


class OverloadedError(ServerError):
    """The queue is full; the client may try again."""

    status = 503
    type = "ServiceUnavailableError"
    retry_after_s = 1


class ConcurrencyLimitError(ServerError):
    """One API key has as many requests open as it may; the client may try again."""

    status = 429
    type = "RateLimitError"
    code = "rate_limit_exceeded"
    retry_after_s = 1


class ConflictError(ServerError):
    """The order and the engine's state do not go together: another order must come first."""

    status = 409
    type = "ConflictError"
    code = None


class DeadlineError(ServerError):
    """The time that the client gave its request is over, and it has no part of an answer."""

    status = 408
    type = "TimeoutError"
    code = None


class EngineCallError(ServerError):
    """The engine could not carry out an order of the control plane. It goes on."""


class EngineGenerateError(ServerError):
    """The engine failed one request. Recoverable: the others go on."""


class EngineDeadError(ServerError):
    """The engine process is gone. Unrecoverable: every request fails from now on."""

    status = 503
    type = "EngineDeadError"


class ShuttingDownError(ServerError):
    """The server is draining: nothing new is accepted, and what ran out of time ends."""

    status = 503
    type = "ServiceUnavailableError"
    retry_after_s = 5


class ClientGoneError(ServerError):
    """The client has closed its connection."""

    status = 499
    type = "ClientGoneError"
    code = None


class StartupError(ServerError):
    """The server cannot start: a bad flag, model or port."""
