"""The training protocol over HTTP, for both ends: paths, headers, JSON bodies and statuses.

    POST /api/v1/training/hello             Join       -> Welcome
    GET  /api/v1/training/next?after=ID&wait_s=S       -> a message, its id in a header; 204: none
    POST /api/v1/training/reply?message=ID  a message  -> {"outcome": a ReplyOutcome}
    POST /api/v1/training/decline           Decline    -> 204
    POST /api/v1/training/alive                        -> 204

Messages travel as bytes (messages.py), all else as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.records import read_record
from edge_sdk.training.protocol.fine_tuning import FineTuning

JOIN_PATH: Final = "/api/v1/training/hello"
NEXT_PATH: Final = "/api/v1/training/next"
REPLY_PATH: Final = "/api/v1/training/reply"
DECLINE_PATH: Final = "/api/v1/training/decline"
ALIVE_PATH: Final = "/api/v1/training/alive"

MESSAGE_ID: Final = "Training-Message"
MESSAGE_TYPE: Final = "application/octet-stream"

# How long the trainer holds a poll that has nothing to bring.
POLL_S: Final = 20.0
ID_CHARACTERS: Final = 64
REASON_CHARACTERS: Final = 500

NOT_JOINED: Final = 409  # the trainer does not know this device: join first
ENDED: Final = 410  # training is over
BUSY: Final = 429  # send it again


@dataclass(frozen=True, slots=True)
class Join:
    """Description of a device's data, sent when it joins; the samples stay there.

    Nothing depends on its labels, which may be no peer's business: a device refuses a plan of fewer
    classes than it has, and labels that are sent are checked when they come.

    Attributes:
        samples: how many it trains on.
        input_shape: of one sample.
    """

    samples: int
    input_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer of the trainer to a device that joins.

    Attributes:
        training: its name.
        run: one training of that name, from its first round to its last; a resumed one is the same.
        no_reply_s: silence of the trainer after which a device finishes the round alone.
        alive_s: how often a device says that it is alive, whatever it does meanwhile.
        backbone: name of the network; empty from a trainer of an earlier release.
        fine_tuning: personalisation of the device when training ends; none from such a trainer.
        class_names: in the order of the training's labels; none from such a trainer.
    """

    training: str
    run: str
    no_reply_s: float
    alive_s: float
    backbone: str = ""
    fine_tuning: FineTuning = field(default_factory=FineTuning)
    class_names: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Welcome:
        """Read the trainer's answer.

        Raises: FrameError if a field is missing or not of its type.
        """
        try:
            how = read_record(FineTuning, fields.get("fine_tuning", {}), "fine_tuning")
            return cls(
                training=str(fields["training"]),
                run=str(fields["run"]),
                no_reply_s=float(fields["no_reply_s"]),
                alive_s=float(fields["alive_s"]),
                backbone=str(fields.get("backbone", "")),
                fine_tuning=how,
                class_names=tuple(map(str, fields.get("class_names", ()))),
            )
        except (KeyError, TypeError, ValueError, ConfigurationError) as err:
            raise FrameError(f"expected a trainer's welcome, got another answer ({err!r})") from err


@dataclass(frozen=True, slots=True)
class Decline:
    """A message that the device cannot do: its id, and why.

    With an empty id, the device takes no part in this training at all. A trainer of an earlier
    release ignores it.
    """

    message: str
    reason: str


class ReplyOutcome(StrEnum):
    """Result of handing a reply to the trainer."""

    TAKEN = "taken"
    KEPT = "kept"  # an update that no round waits for yet
    LATE = "late"
    DUPLICATE = "duplicate"
    UNEXPECTED = "foreign"  # to no message of this trainer, or of another kind, round or step
