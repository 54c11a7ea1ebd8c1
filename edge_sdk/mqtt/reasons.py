"""Why there is no connection to a broker, in words that tell more than the names of MQTT do."""

from __future__ import annotations

import socket
import ssl
from typing import Final

from paho.mqtt.reasoncodes import ReasonCode

# names of reasons that do not say why a connection ended
_SAYS_NOTHING: Final = ("Normal disconnection", "Success", "Unspecified error")


def why_unreachable(err: BaseException | None, host: str) -> str:
    """Why an attempt to connect failed.

    Args:
        err: what the attempt raised. host: of the broker.
    """
    match err:
        case socket.gaierror():
            why = f"the name {host} cannot be resolved ({err.strerror})"
        case ssl.SSLCertVerificationError():
            why = (
                f"its certificate is not trusted here ({err.verify_message}); copy that of its"
                " authority here and give it: --ca of `agent enroll`, --mqtt-ca of `server run`"
            )
        case ssl.SSLError():
            why = f"TLS failed ({err.reason or err.strerror})"
        case ConnectionRefusedError():
            why = "connection refused: no program listens on this port"
        case TimeoutError():
            why = "the connection attempt timed out"
        case _:
            why = f"cannot connect ({getattr(err, 'strerror', None) or err})"
    return why


def why_lost(reason: ReasonCode) -> str:
    """Why a connection ended that was up."""
    # for a connection that ended without a word, paho says "Unspecified error"
    if reason.getName() in _SAYS_NOTHING:
        return "the connection was lost: the broker ended, or the network failed"
    return f"the connection was lost: {reason}"
