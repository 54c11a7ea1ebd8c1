"""The trainer as a device reaches it: hello, fetch a message, post a reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from edge_sdk.errors import FrameError, FrameTooLargeError, LinkError, SplitedgeError
from edge_sdk.http import HttpClient, Response, ResponseTooLargeError, Timeout
from edge_sdk.identity import Identity
from edge_sdk.tls import tls_context_for
from edge_sdk.training.protocol.messages import (
    BYTES_MAX,
    EndRound,
    Evaluate,
    Outputs,
    Reply,
    Request,
    StartRound,
    Step,
    from_bytes,
    to_bytes,
)

MESSAGE_ID: Final = "Training-Message"
BUSY: Final = 429  # taken later
CONNECT_S: Final = 5.0
# What the network may add to the time a poll is held; what a reply may take to be taken.
SLACK_S: Final = 0.5
ANSWER_S: Final = 30.0


class TrainingEndedError(SplitedgeError):
    """Training is over."""


class NotThereError(SplitedgeError):
    """The trainer does not know this device: it was restarted since the device said hello."""


class RefusedReplyError(SplitedgeError):
    """The trainer refuses what was sent, and would again."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What this device takes part in.

    run: one training of that name; a resumed one is the same.
    no_reply_s: silence of the trainer after which it goes on by itself.
    alive_s: how often it is to say that it is there.
    """

    training: str
    run: str
    no_reply_s: float
    alive_s: float


class TrainerLink:
    """One connection, kept open between messages.

    Args:
        url: `http(s)://HOST:PORT` of the trainer.
    """

    def __init__(self, identity: Identity, url: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": identity.authorization}
        # the second connection is the heartbeat's
        self._client = HttpClient(tls=tls_context_for(url, identity.ca), connections=2)

    def hello(self, samples: int, input_shape: tuple[int, ...]) -> Welcome:
        """Say that this device is there; nothing that depends on its labels.

        Raises: LinkError, TrainingEndedError; RefusedReplyError if its data do not fit.
        """
        said = {"samples": samples, "input_shape": list(input_shape)}
        data = _json(self._call("POST", "hello", raw=orjson.dumps(said), json=True).body)
        try:
            times = (float(data[name]) for name in ("no_reply_s", "alive_s"))
            return Welcome(str(data["training"]), str(data["run"]), *times)
        except (KeyError, TypeError, ValueError) as err:
            raise LinkError(f"{self._url}: no welcome of a trainer ({err!r})") from err

    def alive(self) -> None:
        """Say that this device is there; from any thread, while another call is under way.

        Raises: LinkError, RefusedReplyError.
        """
        self._call("POST", "alive", timeout_s=CONNECT_S)

    def fetch(self, after: str, wait_s: float) -> tuple[str, Request] | None:
        """The next message and its id; None where there is none within `wait_s`.

        Args:
            after: id of the last message dealt with.
        Raises: LinkError, TrainingEndedError, NotThereError; FrameError for a bad message.
        """
        response = self._call(
            "GET", "next", {"after": after, "wait_s": f"{wait_s:.3f}"}, timeout_s=wait_s + SLACK_S
        )
        if response.status == 204:
            return None
        message = from_bytes(response.body)
        if not isinstance(message, StartRound | Step | Outputs | EndRound | Evaluate):
            raise FrameError(f"{self._url}: expected a request, got {type(message).__name__}")
        return response.headers.get(MESSAGE_ID, ""), message

    def reply(self, identifier: str, reply: Reply, timeout_s: float = ANSWER_S) -> str:
        """Hand over a reply; what the trainer made of it.

        Raises: LinkError, TrainingEndedError, NotThereError, RefusedReplyError.
        """
        fields = {"message": identifier}
        response = self._call("POST", "reply", fields, raw=to_bytes(reply), timeout_s=timeout_s)
        return str(_json(response.body).get("outcome", ""))

    def decline(self, identifier: str, reason: str) -> None:
        """Say that a message cannot be done.

        Raises: as `reply`.
        """
        said = {"message": identifier, "reason": reason[:500]}
        self._call("POST", "decline", raw=orjson.dumps(said), json=True)

    def close(self) -> None:
        """Drop the connection."""
        self._client.close()

    def _call(
        self,
        method: str,
        name: str,
        fields: dict[str, str] | None = None,
        *,
        raw: bytes | None = None,
        json: bool = False,
        timeout_s: float = ANSWER_S,
    ) -> Response:
        url = f"{self._url}/api/v1/training/{name}"
        if fields is not None:
            url += "?" + "&".join(f"{key}={value}" for key, value in fields.items())
        content = "application/json" if json else "application/octet-stream"
        try:
            response = self._client.request(
                method,
                url,
                headers={**self._headers, "Content-Type": content},
                body=raw,
                timeout=Timeout(connect_s=min(CONNECT_S, timeout_s), read_s=timeout_s),
                at_most=BYTES_MAX,
            )
        except ResponseTooLargeError as err:
            raise FrameTooLargeError(str(err)) from err
        if response.status in (200, 204):
            return response
        text = f"{self._url}: {_json(response.body).get('error', '')} (HTTP {response.status})"
        match response.status:
            case 410:
                raise TrainingEndedError(text)
            case 409:
                raise NotThereError(text)
            case status if 400 <= status < 500 and status != BUSY:
                raise RefusedReplyError(text)
        raise LinkError(text)


def _json(raw: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}
