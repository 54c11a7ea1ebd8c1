"""The trainer as a device reaches it: join, fetch a message, post a reply."""

from __future__ import annotations

import time
from collections.abc import Callable
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
from edge_sdk.wire.clear_text import refuse_clear_text

CONNECT_S: Final = 5.0
# What the network may add to the time a poll is held; how long the trainer may take for a reply.
SLACK_S: Final = 0.5
ANSWER_S: Final = 30.0
UNAUTHORISED: Final = 401
RENEWAL_S: Final = 2.0
RENEWAL_PAUSE_S: Final = 0.1


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
        renewed: the identity as it is on the disk, asked for where the credential is refused: the
            device's agent may have replaced it meanwhile.
    Raises: ConfigurationError for one on another machine without encryption, unless the identity is
        `insecure`.
    """

    def __init__(
        self, identity: Identity, url: str, renewed: Callable[[], Identity] | None = None
    ) -> None:
        refuse_clear_text(url, "trainer", insecure=identity.insecure)
        self._url = url.rstrip("/")
        self._authorization = identity.authorization
        self._renewed = renewed
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
        body = raw if json is None else orjson.dumps(asdict(json))

        def send(authorization: str) -> Response:
            return self._http.request(
                method,
                self._url + path,
                headers={"Authorization": authorization, "Content-Type": content},
                body=body,
                timeout=Timeout(connect_s=min(CONNECT_S, timeout_s), read_s=timeout_s),
                at_most=BYTES_MAX,
            )

        try:
            used = self._authorization
            response = send(used)
            if response.status == UNAUTHORISED and self._renew(used):
                response = send(self._authorization)
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

    def _renew(self, used: str) -> bool:
        """Whether there is another credential than the one that was used."""
        if self._renewed is None:
            return False
        end = time.monotonic() + RENEWAL_S
        while True:
            self._authorization = self._renewed().authorization
            if self._authorization != used:
                return True
            # between the server's confirmation and the disk of this device is a moment
            if time.monotonic() > end:
                return False
            time.sleep(RENEWAL_PAUSE_S)


def _json(raw: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}
