"""The device's side of splitedge: call `enroll` once, then use `EdgeAgent`.

Names load when first used: the broker and the update process need the wire, not onnxruntime.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from edge_sdk.installation import import_profiles, installed_version

if TYPE_CHECKING:
    __version__: str
    from edge_sdk.agent import EdgeAgent
    from edge_sdk.answers.observer import Answered, AnswerObserver
    from edge_sdk.answers.prediction import LateAnswer, Prediction
    from edge_sdk.api import enroll
    from edge_sdk.errors import SplitedgeError
    from edge_sdk.settings import AgentSettings, Agreement, Budget, Learn, Power, Traces

__all__ = [
    "AgentSettings",
    "Agreement",
    "AnswerObserver",
    "Answered",
    "Budget",
    "EdgeAgent",
    "LateAnswer",
    "Learn",
    "Power",
    "Prediction",
    "SplitedgeError",
    "Traces",
    "__version__",
    "enroll",
]

_HOME = {
    "AgentSettings": "edge_sdk.settings",
    "Agreement": "edge_sdk.settings",
    "AnswerObserver": "edge_sdk.answers.observer",
    "Answered": "edge_sdk.answers.observer",
    "Budget": "edge_sdk.settings",
    "EdgeAgent": "edge_sdk.agent",
    "LateAnswer": "edge_sdk.answers.prediction",
    "Learn": "edge_sdk.settings",
    "Power": "edge_sdk.settings",
    "Prediction": "edge_sdk.answers.prediction",
    "SplitedgeError": "edge_sdk.errors",
    "Traces": "edge_sdk.settings",
    "enroll": "edge_sdk.api",
}


import_profiles()


def __getattr__(name: str) -> object:
    if name == "__version__":
        return installed_version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
