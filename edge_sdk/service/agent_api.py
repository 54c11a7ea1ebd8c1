"""The API of a running agent: from a request to a response, by any carrier.

`/v2/...` is the Open Inference Protocol v2, as the server speaks it. `/metrics` is for Prometheus,
`/agent/...` for the command line and for programs that correct answers or fetch late ones. No I/O:
carriers are beside.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import orjson

from edge_sdk.errors import (
    ConfigurationError,
    FrameError,
    FrameTooLargeError,
    InputError,
    OutOfMemoryError,
    SplitedgeError,
)
from edge_sdk.installation import installed_version
from edge_sdk.metrics.agent_metrics import agent_metrics
from edge_sdk.metrics.text_format import CONTENT_TYPE
from edge_sdk.service import inference
from edge_sdk.service.messages import (
    Request,
    RequestError,
    Response,
    error_response,
    json_response,
)

if TYPE_CHECKING:
    from edge_sdk.agent import EdgeAgent

logger = logging.getLogger(__name__)

# a client that finds all places taken comes again after this time
RETRY_S: Final = 1
# by then the agent may have a smaller bundle, or another program may have freed memory
RETRY_MEMORY_S: Final = 5
STARTING: Final = "the agent is starting: its bundle is not loaded yet"

UNTRUSTED: Final = "ask over the socket in the state folder, or run the agent with a serve secret"

Handler = Callable[[Request], Response]


class AgentApi:
    """Answers requests to one agent, from any thread.

    Args:
        in_flight: most inferences at one time; one more is refused with status 429.
    Attributes:
        agent: None until its bundle is loaded, and once it closes: requests get status 503.
    """

    def __init__(self, in_flight: int) -> None:
        self.agent: EdgeAgent | None = None
        self._in_flight = in_flight
        self._places = threading.BoundedSemaphore(in_flight)
        self._updating = threading.Lock()
        self._rotating = threading.Lock()

    def answer(self, request: Request, *, local: bool, trusted: bool) -> Response:
        """Answer a request; a fault of the request or the agent is an answer too.

        Args:
            local: whether it came over the socket in the state folder, for the command line.
            trusted: whether it came over that socket or with the secret, and so may change what
                the agent knows.
        """
        try:
            return self._route(request, local, trusted)
        except SplitedgeError as err:
            return error_response(_as_request_error(err))
        except Exception:  # outermost catch: the log gets the traceback, the peer a fixed text
            logger.exception("%s %s failed", request.method, request.path)
            text = "the agent failed on this request; its log says why"
            return error_response(RequestError(500, text))

    def _route(self, request: Request, local: bool, trusted: bool) -> Response:
        words = request.path.strip("/").split("/")
        handler: Handler
        match words:
            case ["v2"]:
                method, handler = "GET", self._about
            case ["v2", "health", "live"]:
                method, handler = "GET", lambda _: json_response({"live": True})
            case ["v2", "health", "ready"]:
                method, handler = "GET", self._ready
            case ["v2", "repository", "index"]:
                method, handler = "POST", self._index
            case ["metrics"]:
                method, handler = "GET", self._metrics
            case ["v2", "models", name, *rest]:
                method, handler = self._of_model(name, rest)
            case ["agent", *rest] if "/".join(rest) in self._own(local):
                method, handler = self._own(local)["/".join(rest)]
            case _:
                raise _no_route(request.path)
        guarded = (self._correct, self._late, self._acknowledge, self._turn)
        if handler in guarded and not trusted:
            raise RequestError(403, f"{request.path}: {UNTRUSTED}")
        if request.method != method:
            raise RequestError(405, f"{request.path}: expected {method}, got {request.method}")
        return handler(request)

    def _of_model(self, name: str, rest: list[str]) -> tuple[str, Handler]:
        """Method and handler of a path below /v2/models/NAME."""
        version = None
        if rest[:1] == ["versions"] and len(rest) > 1:
            version, rest = rest[1], rest[2:]

        def about(_: Request) -> Response:
            manifest = inference.find(self._opened().manifest, name, version)
            return json_response(inference.metadata(manifest))

        def ready(_: Request) -> Response:
            inference.find(self._opened().manifest, name, version)
            return json_response({"ready": True})

        def infer(request: Request) -> Response:
            agent = self._opened()
            inference.find(agent.manifest, name, version)
            with self._place():
                return inference.infer(agent, request)

        match rest:
            case []:
                return "GET", about
            case ["ready"]:
                return "GET", ready
            case ["infer"]:
                return "POST", infer
        raise _no_route(f"/v2/models/{name}/{'/'.join(rest)}")

    def _own(self, local: bool) -> dict[str, tuple[str, Handler]]:
        """Methods and handlers below /agent/."""
        routes: dict[str, tuple[str, Handler]] = {
            "status": ("GET", self._status),
            "correct": ("POST", self._correct),
            "late": ("GET", self._late),
            "late/acknowledge": ("POST", self._acknowledge),
            "offloading": ("POST", self._turn),
        }
        if local:
            routes |= {
                "predict": ("POST", self._predict),
                "refresh": ("POST", self._refresh),
                "rotate": ("POST", self._rotate),
            }
        return routes

    def _opened(self) -> EdgeAgent:
        agent = self.agent
        if agent is None:
            raise RequestError(503, STARTING, retry_after_s=RETRY_S)
        return agent

    @contextmanager
    def _place(self) -> Iterator[None]:
        if not self._places.acquire(blocking=False):
            text = f"{self._in_flight} requests are being answered; ask again in {RETRY_S} s"
            raise RequestError(429, text, retry_after_s=RETRY_S)
        try:
            yield
        finally:
            self._places.release()

    def _about(self, _: Request) -> Response:
        extensions = ["binary_tensor_data", "model_repository"]
        return json_response(
            {"name": "splitedge-agent", "version": installed_version(), "extensions": extensions}
        )

    def _ready(self, _: Request) -> Response:
        ready = self.agent is not None
        return json_response({"ready": ready}, 200 if ready else 503)

    def _index(self, _: Request) -> Response:
        if self.agent is None:
            return json_response([])
        manifest = self.agent.manifest
        listed = {"name": manifest.model, "version": manifest.version}
        return json_response([{**listed, "state": "READY", "reason": ""}])

    def _status(self, _: Request) -> Response:
        status = asdict(self._opened().status())
        return json_response({**status, "pid": os.getpid()})

    def _metrics(self, _: Request) -> Response:
        text = agent_metrics(self._opened().telemetry())
        return Response(200, text, {"Content-Type": CONTENT_TYPE})

    def _predict(self, request: Request) -> Response:
        with self._place():
            return inference.predict(self._opened(), request)

    def _refresh(self, _: Request) -> Response:
        agent = self._opened()
        with _alone(self._updating, "the bundle is being updated"):
            bundle = agent.refresh()
        return json_response({"device": agent.status().device, "bundle": bundle})

    def _rotate(self, _: Request) -> Response:
        agent = self._opened()
        with _alone(self._rotating, "the credential is being replaced"):
            agent.rotate()
        return json_response({"device": agent.status().device})

    def _turn(self, request: Request) -> Response:
        on = _object(request, "offloading")["offloading"]
        if not isinstance(on, bool):
            raise RequestError(400, f"offloading: expected true or false, got {on!r:.50}")
        agent = self._opened()
        agent.offloading = on
        return json_response({"device": agent.status().device, "offloading": agent.offloading})

    def _correct(self, request: Request) -> Response:
        body = _object(request, "id", "label")
        return json_response({"corrected": self._opened().correct(body["id"], body["label"])})

    def _late(self, _: Request) -> Response:
        answers = self._opened().late_answers()
        return json_response(
            [
                {
                    "id": answer.id,
                    "asked_at": answer.asked_at,
                    "reason": answer.reason,
                    "prediction": answer.prediction and inference.as_row(answer.prediction),
                }
                for answer in answers
            ]
        )

    def _acknowledge(self, request: Request) -> Response:
        identifier = _object(request, "id")["id"]
        return json_response({"acknowledged": self._opened().acknowledge(identifier)})


@contextmanager
def _alone(lock: threading.Lock, what: str) -> Iterator[None]:
    """Hold a lock, or refuse: requests that wait for an hour would take the places of others.

    Raises: RequestError with status 409.
    """
    if not lock.acquire(blocking=False):
        raise RequestError(409, f"{what} already; `splitedge agent status` tells when it is done")
    try:
        yield
    finally:
        lock.release()


def _as_request_error(error: SplitedgeError) -> RequestError:
    """The status of a fault of the request, or of the agent."""
    text = str(error)
    match error:
        case RequestError():
            return error
        case OutOfMemoryError():
            text += f"; ask again in {RETRY_MEMORY_S} s"
            return RequestError(503, text, retry_after_s=RETRY_MEMORY_S)
        case FrameTooLargeError():
            return RequestError(413, text)
        case FrameError() | InputError() | ConfigurationError():
            return RequestError(400, text)
    return RequestError(502, text)


def _object(request: Request, *keys: str) -> dict[str, Any]:
    """The JSON object in the body; `id` is a text, where it is asked for.

    Raises: RequestError naming the keys that are expected.
    """
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError as err:
        raise RequestError(400, f"expected a JSON object, got no JSON ({err})") from err
    fits = isinstance(body, dict) and set(body) == set(keys)
    if not fits or not isinstance(body.get("id", ""), str):
        shape = ", ".join(f'"{key}": ...' for key in keys)
        more = " with the id as a text" if "id" in keys else ""
        raise RequestError(400, f"expected {{{shape}}}{more}")
    found: dict[str, Any] = body
    return found


def _no_route(path: str) -> RequestError:
    known = "/v2/health/ready, /v2/models/MODEL/infer, POST /v2/repository/index, /agent/status"
    return RequestError(404, f"{path!r:.100}: no such path; there are {known}")
