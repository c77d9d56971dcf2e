"""Lists the engine's errors as its callers see them.

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
    pass


class InvalidModel(EngineError):
    """The text is one line that names the file and the remedy."""


class Unsupported(EngineError):
    pass


class EngineUnavailable(EngineError):
    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after  # seconds


class EngineFailed(EngineError):
    """What failed is in the engine's log, not here."""


class OutOfMemory(EngineError):
    pass


class ConstraintUnmet(EngineError):
    """Also raised where constraints cannot be used with this model."""


class ConstraintTooCostly(EngineError):
    pass


class Quarantined(EngineError):
    pass


class DeadlineExceeded(EngineError):
    pass


class Aborted(EngineError):
    pass
