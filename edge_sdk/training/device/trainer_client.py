"""The trainer as a device reaches it: join, fetch a message, post a reply."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import orjson

from edge_sdk.errors import FrameError, FrameTooLargeError, LinkError, SplitedgeError
from edge_sdk.http import HttpClient, Response, ResponseTooLargeError, Timeout
from edge_sdk.identity import Identity
from edge_sdk.tls import tls_context_for
from edge_sdk.training.protocol.http import (
    ALIVE_PATH,
    BUSY,
    DECLINE_PATH,
    ENDED,
    JOIN_PATH,
    MESSAGE_ID,
    MESSAGE_TYPE,
    NEXT_PATH,
    NOT_JOINED,
    REASON_CHARACTERS,
    REPLY_PATH,
    Decline,
    Join,
    Welcome,
)
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

CONNECT_S: Final = 5.0
# What the network may add to the time a poll is held; how long the trainer may take for a reply.
SLACK_S: Final = 0.5
ANSWER_S: Final = 30.0


class TrainingEndedError(SplitedgeError):
    """Training is over."""


class NotJoinedError(SplitedgeError):
    """The trainer does not know this device: it was restarted since the device joined."""


class RefusedReplyError(SplitedgeError):
    """The trainer refuses what was sent, and would refuse it again."""


class TrainerClient:
    """Connections to one trainer, kept open between messages.

    Args:
        url: `http(s)://HOST:PORT` of the trainer.
    """

    def __init__(self, identity: Identity, url: str) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": identity.authorization}
        # the second connection is the heartbeat's
        self._http = HttpClient(tls=tls_context_for(url, identity.ca), connections=2)

    def join(self, samples: int, input_shape: tuple[int, ...]) -> Welcome:
        """Tell the trainer that this device is there, and nothing that depends on its labels.

        Raises: LinkError, TrainingEndedError; RefusedReplyError if its data do not fit.
        """
        response = self._call("POST", JOIN_PATH, json=Join(samples, input_shape))
        try:
            return Welcome.from_dict(_json(response.body))
        except FrameError as err:
            raise LinkError(f"{self._url}: {err}; is this a trainer?") from err

    def alive(self) -> None:
        """Send a sign of life; from any thread, while another call is under way.

        Raises: LinkError, RefusedReplyError.
        """
        self._call("POST", ALIVE_PATH, timeout_s=CONNECT_S)

    def fetch(self, after: str, wait_s: float) -> tuple[str, Request] | None:
        """The next message and its id; None where there is none within `wait_s`.

        Args:
            after: id of the last message dealt with.
        Raises: LinkError, TrainingEndedError, NotJoinedError; FrameError for a bad message.
        """
        query = f"?after={after}&wait_s={wait_s:.3f}"
        response = self._call("GET", NEXT_PATH + query, timeout_s=wait_s + SLACK_S)
        if response.status == 204:
            return None
        message = from_bytes(response.body)
        if not isinstance(message, StartRound | Step | Outputs | EndRound | Evaluate):
            raise FrameError(f"{self._url}: expected a request, got {type(message).__name__}")
        return response.headers.get(MESSAGE_ID, ""), message

    def reply(self, identifier: str, reply: Reply, timeout_s: float = ANSWER_S) -> str:
        """Hand over a reply; a ReplyOutcome's value tells what became of it.

        Raises: LinkError, TrainingEndedError, NotJoinedError, RefusedReplyError.
        """
        path = f"{REPLY_PATH}?message={identifier}"
        response = self._call("POST", path, raw=to_bytes(reply), timeout_s=timeout_s)
        return str(_json(response.body).get("outcome", ""))

    def decline(self, identifier: str, reason: str) -> None:
        """Tell the trainer that a message cannot be done, and why.

        Args:
            identifier: the message's; "" for a device that takes no part in this training at all.
        Raises: as `reply`.
        """
        self._call("POST", DECLINE_PATH, json=Decline(identifier, reason[:REASON_CHARACTERS]))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _call(
        self,
        method: str,
        path: str,
        *,
        raw: bytes | None = None,
        json: Join | Decline | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Response:
        content = MESSAGE_TYPE if json is None else "application/json"
        try:
            response = self._http.request(
                method,
                self._url + path,
                headers={**self._headers, "Content-Type": content},
                body=raw if json is None else orjson.dumps(asdict(json)),
                timeout=Timeout(connect_s=min(CONNECT_S, timeout_s), read_s=timeout_s),
                at_most=BYTES_MAX,
            )
        except ResponseTooLargeError as err:
            raise FrameTooLargeError(str(err)) from err
        if response.status in (200, 204):
            return response
        text = f"{self._url}: {_json(response.body).get('error', '')} (HTTP {response.status})"
        if response.status == ENDED:
            raise TrainingEndedError(text)
        if response.status == NOT_JOINED:
            raise NotJoinedError(text)
        if 400 <= response.status < 500 and response.status != BUSY:
            raise RefusedReplyError(text)
        raise LinkError(text)


def _json(raw: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}
