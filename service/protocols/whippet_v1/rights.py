"""Lists the right that each RPC needs. Health and reflection need none."""

from __future__ import annotations

from collections.abc import Mapping

from service.transport.call.auth import ALL_RIGHTS, Right, Rights

GENERATION = "whippet.v1.GenerationService"
MODEL = "whippet.v1.ModelService"
ADMIN = "whippet.v1.AdminService"

_GENERATE: Rights = frozenset((Right.GENERATE,))
_ADMIN: Rights = frozenset((Right.ADMIN,))
_LOOK: Rights = frozenset((Right.VIEW, Right.ADMIN))  # at what is there beside one's own requests

# Service → method → rights, any of which will do.
RIGHTS: Mapping[str, Mapping[str, Rights]] = {
    GENERATION: {
        "GenerateStream": _GENERATE,
        "Generate": _GENERATE,
        "Tokenize": _GENERATE,
        "Detokenize": _GENERATE,
    },
    MODEL: {
        "ListModels": ALL_RIGHTS,
        "GetModel": ALL_RIGHTS,
    },
    ADMIN: {
        "AbortGeneration": _ADMIN,
        "GetLoad": _LOOK,
        "FlushCache": _ADMIN,
        "ListOptimizations": _LOOK,
        "SetOptimization": _ADMIN,
        "Drain": _ADMIN,
        "Undrain": _ADMIN,
        "Profile": _ADMIN,
    },
}
