"""Runs a server from its flags to its exit code. The engine process is started first, so that both import at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from engine.errors import EngineError, InvalidModel, Unsupported
from engine.launch import Begun
from quant.checkpoint.named import misnamed
from service.config.settings import BadSettings
from service.config.sources import load
from service.core.operations.cache_dir import UnsafeFolder, cache_dir, prebuilt_dir
from service.observability import logs

# Exit codes; beside them those of `service.serving`
BAD_SETTINGS = 2
BAD_MODEL = 3
PORT_TAKEN = 4
BROKEN = 1


def serve(argv: Sequence[str]) -> int:
    """Returns the exit code; an error at the start is one line on stderr."""
    begun = Begun(_kind(argv))
    try:
        return _serve(argv, begun)
    except (BadSettings, UnsafeFolder) as error:
        return _refuse(error, BAD_SETTINGS)
    except (InvalidModel, Unsupported) as error:
        return _refuse(error, BAD_MODEL)
    except EngineError as error:
        return _refuse(error, BROKEN)
    finally:
        begun.end()


def _kind(argv: Sequence[str]) -> str:
    """Guesses the engine's kind before the settings are read: a file of settings may change it."""
    model = any(word.startswith("--model") for word in argv) or "WHIPPET_MODEL" in os.environ
    return "model" if model and not any("fake" in word for word in argv) else "fake"


def _serve(argv: Sequence[str], begun: Begun) -> int:
    settings = load(argv)
    if settings.model and (refused := misnamed(settings.model)):
        raise BadSettings(f"model: {refused}")
    logs.set_up(settings.log_level, settings.log.format)
    with prebuilt_dir(settings.prebuilt_dir, os.environ), cache_dir(settings.cache_dir, os.environ):
        if settings.engine.kind == "model":  # the fake's settings follow from the tokenizer
            begun.tell(settings.engine_settings())
        # A second of imports, in which the engine process has its own.
        from service.serving import run
        from service.transport.ports import PortTaken

        try:
            return run(settings, partial(load, argv, dict(os.environ)), begun)
        except PortTaken as error:
            return _refuse(error, PORT_TAKEN)


def _refuse(error: Exception, code: int) -> int:
    logs.last_line(" ".join(str(error).split()))
    return code
