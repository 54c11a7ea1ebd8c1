"""Asking the agent that runs on a state folder, over its socket there."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson

from edge_sdk.errors import InputError, LinkError, SplitedgeError
from edge_sdk.manifest import TensorSpec
from edge_sdk.service.inference import LIMITS, ROWS_MAX
from edge_sdk.service.listening import connect_in
from edge_sdk.session import Array
from edge_sdk.wire.answers import HEADER_LENGTH
from edge_sdk.wire.frames import DATATYPES, Tensor, encode
from edge_sdk.wire.messages import RAW_INPUT

TIMEOUT_S: Final = 30.0
# an update fetches a bundle and tries it, and thousands of rows may each wait for the server
LONG_S: Final = 900.0
BYTES_AT_ONCE: Final = LIMITS.frame_bytes // 4


class RunningAgent:
    """The agent that another process runs on a state folder.

        running = RunningAgent.find(state)
        if running is not None:
            print(running.status())

    Each request has a connection of its own: an agent closes one that waits for long.
    """

    def __init__(self, state: Path) -> None:
        self._state = state

    @classmethod
    def find(cls, state: Path) -> RunningAgent | None:
        """The agent that answers in that folder; None if there is none.

        Raises: LinkError if there is one, and it cannot be asked.
        """
        connection = _connect(state)
        if connection is None:
            return None
        connection.close()
        return cls(state)

    def status(self) -> dict[str, Any]:
        """Status of the agent, as `EdgeAgent.status` gives it, and the id of its process."""
        status: dict[str, Any] = self._ask("GET", "/agent/status")
        return status

    def refresh(self) -> dict[str, Any]:
        """Fetch the bundle that the server assigns. Returns: device and bundle."""
        done: dict[str, Any] = self._ask("POST", "/agent/refresh", timeout_s=LONG_S)
        return done

    def rotate(self) -> None:
        """Replace the device's credential, as `EdgeAgent.rotate`."""
        self._ask("POST", "/agent/rotate")

    def turn_offloading(self, on: bool) -> None:
        """Let the agent ask its server or not, as `EdgeAgent.offloading`."""
        self._ask("POST", "/agent/offloading", orjson.dumps({"offloading": on}))

    def correct(self, identifier: str, label: int | str) -> bool:
        """Tell the agent the right label of an answer, as `EdgeAgent.correct`.

        Returns: whether the answer was still remembered.
        """
        body = orjson.dumps({"id": identifier, "label": label})
        return bool(self._ask("POST", "/agent/correct", body)["corrected"])

    def input(self) -> TensorSpec:
        """Dtype and shape of one sample.

        Raises: LinkError if the agent has no bundle at the moment.
        """
        models = self._ask("POST", "/v2/repository/index")
        if not models:
            raise LinkError(f"{self._state}: the agent that runs here is starting or ending")
        described = self._ask("GET", f"/v2/models/{models[0]['name']}")["inputs"][0]
        return TensorSpec(DATATYPES[described["datatype"]].name, tuple(described["shape"][1:]))

    def predict(
        self, samples: Iterable[Array], parameters: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Predictions of the samples, in order, each as the fields of a `Prediction`.

        Args:
            samples: each of the input's dtype and shape.
            parameters: of the requests: `deadline_ms`, `threshold`, `local`.
        """
        held: list[Array] = []
        for sample in samples:
            held.append(sample)
            if len(held) == ROWS_MAX or len(held) * sample.nbytes > BYTES_AT_ONCE:
                yield from self._predict(held, parameters)
                held = []
        if held:
            yield from self._predict(held, parameters)

    def _predict(
        self, samples: Sequence[Array], parameters: dict[str, Any]
    ) -> list[dict[str, Any]]:
        tensor = Tensor(RAW_INPUT, np.stack(samples))
        text, parts = encode({"parameters": parameters}, [tensor], key="inputs")
        headers = {HEADER_LENGTH: str(len(text))}
        body = b"".join((text, *parts))
        answer = self._ask("POST", "/agent/predict", body, headers, timeout_s=LONG_S)
        found: list[dict[str, Any]] = answer["predictions"]
        return found

    def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """The JSON of the answer.

        Raises: InputError for a request that the agent refuses; SplitedgeError with its reason for
            what it could not do; LinkError if it has ended, or gives no answer in time.
        """
        connection = _connect(self._state)
        if connection is None:
            raise LinkError(f"{self._state}: the agent that ran here has ended")
        asking = http.client.HTTPConnection("localhost")
        asking.sock = connection
        connection.settimeout(timeout_s)
        try:
            asking.request(method, path, body, headers or {})
            response = asking.getresponse()
            raw = response.read()
        except TimeoutError as err:
            raise LinkError(
                f"{self._state}: the agent that runs here gave no answer within {timeout_s:g} s"
            ) from err
        except (OSError, http.client.HTTPException) as err:
            raise LinkError(
                f"{self._state}: the agent that ran here gave no answer; has it ended?"
            ) from err
        finally:
            asking.close()
        answer = orjson.loads(raw)
        if response.status == 200:
            return answer
        raise (InputError if response.status == 400 else SplitedgeError)(answer["error"])


def _connect(state: Path) -> socket.socket | None:
    """A connection to the agent in that folder; None if there is none.

    Raises: LinkError if there is one, and it cannot be asked.
    """
    try:
        return connect_in(state)
    except OSError as err:
        raise LinkError(
            f"{state}: an agent runs here, and cannot be asked ({err.strerror}); run this "
            "command as the user of the agent"
        ) from err
