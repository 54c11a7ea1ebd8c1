"""The routes of the API and who may use each, in one table.

A route that is not in it does not exist for anybody: `rule_of` finds none, and the guard answers
404. Two paths of the table never match the same request; a test checks both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final

from server.access.rules import (
    DESCRIBE,
    DEVICES,
    INFER,
    ITSELF,
    ITSELF_OR_OPERATE,
    ITSELF_WAITING,
    OPERATE,
    OPERATE_OR_TRAIN,
    PUBLIC,
    Rule,
)

# the page and what it asks for: public files, and routes with a sign-in of their own
UNGUARDED: Final = ("/", "/favicon.ico")
UNGUARDED_FOLDER: Final = "/dashboard/"

# paths whose rule is remembered, and the longest of them: a search takes longer than a small model
KNOWN_PATHS: Final = 1_024
KNOWN_LENGTH: Final = 200

_MODEL: Final = "/v2/models/{name}"
_VERSION: Final = f"{_MODEL}/versions/{{version}}"
_DEVICE: Final = "/api/v1/devices/{device_id}"
_PUBLISHED: Final = "/api/v1/models/{name}"

TABLE: Final[Mapping[str, Rule]] = {
    "GET /docs": DESCRIBE,
    "GET /docs/{file}": DESCRIBE,
    "GET /openapi.json": DESCRIBE,
    "GET /metrics": DESCRIBE,
    # the Open Inference Protocol
    "GET /v2": INFER,
    "GET /v2/health/live": PUBLIC,
    "GET /v2/health/ready": PUBLIC,
    "POST /v2/repository/index": INFER,
    "POST /v2/repository/models/{name}/load": OPERATE,
    "POST /v2/repository/models/{name}/unload": OPERATE,
    "GET /v2/models/stats": INFER,
    f"GET {_MODEL}": INFER,
    f"GET {_VERSION}": INFER,
    f"GET {_MODEL}/config": INFER,
    f"GET {_VERSION}/config": INFER,
    f"GET {_MODEL}/stats": INFER,
    f"GET {_VERSION}/stats": INFER,
    f"GET {_MODEL}/ready": INFER,
    f"GET {_VERSION}/ready": INFER,
    f"POST {_MODEL}/infer": INFER,
    f"POST {_VERSION}/infer": INFER,
    # devices about themselves
    "POST /api/v1/enroll": PUBLIC,
    "POST /api/v1/link/echo": DEVICES,
    "GET /tuf/{part}/{path:path}": DEVICES,
    f"GET {_DEVICE}": ITSELF_OR_OPERATE,
    f"GET {_DEVICE}/approval": ITSELF_WAITING,
    f"GET {_DEVICE}/assignment": ITSELF,
    f"GET {_DEVICE}/capability": ITSELF_OR_OPERATE,
    f"GET {_DEVICE}/connection": ITSELF,
    f"POST {_DEVICE}/credential": ITSELF,
    f"POST {_DEVICE}/credential/confirm": ITSELF,
    f"PUT {_DEVICE}/conditions": ITSELF,
    f"POST {_DEVICE}/failures": ITSELF,
    f"PUT {_DEVICE}/measurements": ITSELF,
    f"POST {_DEVICE}/orders/done": ITSELF,
    f"PUT {_DEVICE}/profile": ITSELF,
    f"GET {_DEVICE}/telemetry": ITSELF_OR_OPERATE,
    f"GET {_DEVICE}/unmeasured": ITSELF,
    f"PUT {_DEVICE}/update": ITSELF,
    # devices, for who manages them
    "GET /api/v1/devices": OPERATE_OR_TRAIN,
    "POST /api/v1/tokens": OPERATE,
    f"DELETE {_DEVICE}": OPERATE,
    f"POST {_DEVICE}/approve": OPERATE,
    f"POST {_DEVICE}/command": OPERATE_OR_TRAIN,  # the scope train: invitations alone
    f"DELETE {_DEVICE}/pin": OPERATE,
    f"PUT {_DEVICE}/pin": OPERATE,
    f"DELETE {_DEVICE}/quarantine": OPERATE,
    f"GET {_DEVICE}/quarantine": OPERATE,
    f"POST {_DEVICE}/reject": OPERATE,
    f"POST {_DEVICE}/revoke": OPERATE,
    f"POST {_DEVICE}/rotate": OPERATE,
    f"PUT {_DEVICE}/tags": OPERATE,
    f"PUT {_DEVICE}/title": OPERATE,
    # models and fleets
    "GET /api/v1/models": OPERATE,
    f"DELETE {_PUBLISHED}": OPERATE,
    f"POST {_PUBLISHED}/rollback": OPERATE,
    f"DELETE {_PUBLISHED}/versions/{{version}}": OPERATE,
    f"POST {_PUBLISHED}/versions/{{version}}/activate": OPERATE,
    "DELETE /api/v1/fleets/{fleet}/model": OPERATE,
    "PUT /api/v1/fleets/{fleet}/model": OPERATE,
    # roll-outs
    "GET /api/v1/rollouts": OPERATE,
    "POST /api/v1/rollouts": OPERATE,
    "GET /api/v1/rollouts/{rollout_id}": OPERATE,
    "POST /api/v1/rollouts/{rollout_id}/abort": OPERATE,
    "POST /api/v1/rollouts/{rollout_id}/pause": OPERATE,
    "POST /api/v1/rollouts/{rollout_id}/resume": OPERATE,
    # the server
    "GET /api/v1/alerts": OPERATE,
    "POST /api/v1/alerts/silence": OPERATE,
    "GET /api/v1/audit": OPERATE,
    "GET /api/v1/load": OPERATE,
    "GET /api/v1/signing": OPERATE,
    "GET /api/v1/telemetry": OPERATE,
}


def is_guarded(path: str) -> bool:
    """Whether the table has to name the path: every one but those of the dashboard.

    The exceptions are listed, not the rule: Starlette also finds `/metrics` where a path has a
    newline after it, which a list of what is guarded would have to know.
    """
    return path not in UNGUARDED and not path.startswith(UNGUARDED_FOLDER)


def rule_of(method: str, path: str) -> tuple[Rule, Mapping[str, str]] | None:
    """The rule of a request, and the names in its path; None if no route is meant."""
    # strangers choose the paths, so memory is bounded by their length too
    return _known(method, path) if len(path) <= KNOWN_LENGTH else _found(method, path)


def _found(method: str, path: str) -> tuple[Rule, Mapping[str, str]] | None:
    return next(
        (
            (rule, found.groupdict())
            for known, pattern, rule in _PATTERNS
            if known == method and (found := pattern.fullmatch(path))
        ),
        None,
    )


_known = functools.lru_cache(KNOWN_PATHS)(_found)


def methods_of(path: str) -> list[str]:
    """The methods of the routes at a path."""
    return [method for method, pattern, _ in _PATTERNS if pattern.fullmatch(path)]


def _pattern(template: str) -> re.Pattern[str]:
    """The paths that a template means, as Starlette reads it."""
    parts = re.split(r"\{(\w+)(:path)?\}", template)
    text = ""
    for fixed, name, whole in zip(
        parts[::3], [*parts[1::3], None], [*parts[2::3], None], strict=True
    ):
        text += re.escape(fixed)
        if name is not None:
            text += f"(?P<{name}>{'.*' if whole else '[^/]+'})"
    return re.compile(text, re.DOTALL)


def _patterns() -> list[tuple[str, re.Pattern[str], Rule]]:
    """Method, paths and rule of each route."""
    entries = [(*entry.partition(" "), rule) for entry, rule in TABLE.items()]
    return [(method, _pattern(template), rule) for method, _, template, rule in entries]


_PATTERNS: Final = _patterns()
