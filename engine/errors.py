"""What can go wrong, as callers of the engine see it.

EngineError
├── InvalidModel        the model folder cannot be served; says which file and what to do
├── Unsupported         a setting or a live switch that this build or machine lacks
├── EngineUnavailable   loading, restarting or stopped: try again later
├── EngineFailed        a step failed: this request is lost, the server is not
├── OutOfMemory         a step had no memory for this request alone: it is lost, the others are not
├── ConstraintUnmet     no token is left that the request's constraint allows
├── ConstraintTooCostly the request's constraint took more time or memory than it may
├── Quarantined         the request has ended the engine process twice: it is not run any more
├── DeadlineExceeded    the caller's deadline passed
└── Aborted             an operator, or a reader that stalled, ended the request
"""

from __future__ import annotations


class EngineError(Exception):
    """Root of all errors that leave the engine."""


class InvalidModel(EngineError):
    """The model folder cannot be served. The text is one line that names the file and the remedy."""


class Unsupported(EngineError):
    """This build, model or machine lacks what was asked for."""


class EngineUnavailable(EngineError):
    """The engine is loading, restarting or stopped."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class EngineFailed(EngineError):
    """A step failed. What failed is in the engine's log, not here."""


class OutOfMemory(EngineError):
    """A step that was run for this request alone, and for few of its tokens, found no memory."""


class ConstraintUnmet(EngineError):
    """No token is left that the request's constraint allows, or the constraint cannot be used with this model."""


class ConstraintTooCostly(EngineError):
    """The request's constraint took more time or memory than a constraint may. Trying again is no use."""


class Quarantined(EngineError):
    """The request has ended the engine process twice, with nobody else in the step. Trying again is no use."""


class DeadlineExceeded(EngineError):
    """The caller's deadline passed before the request was done."""


class Aborted(EngineError):
    """The request was ended from outside."""
