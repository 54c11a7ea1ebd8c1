"""The source `camera:N`: the newest frame of a camera, through OpenCV. Its only importer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from edge_sdk.errors import InputError
from edge_sdk.pipeline.samples import picture_sample
from edge_sdk.pipeline.sources.feed import Array, Feed, Item

_DEVICE: Final = re.compile(r"\d+|/dev/.+|[a-z]+://.+")


def is_live(place: str) -> bool:
    """Whether a camera's name is that of a device or a stream, not of a recorded file."""
    return _DEVICE.fullmatch(place) is not None


class CameraSource:
    """Frames of a camera, a network stream or a video file.

    A live camera is read all the time, and the model gets the newest frame; one that stops is
    opened again until it is back. A file is read frame by frame, and the source ends with it.

    Args:
        open_capture: opens it: an OpenCV VideoCapture.
        name: for people.
        live: whether it is a camera.
    """

    patient = False

    def __init__(self, open_capture: Callable[[], Any], name: str, *, live: bool) -> None:
        self._open_capture = open_capture
        self._name = name
        self.newest = live

    def items(self, feed: Feed) -> Iterator[Item]:
        """The frames, numbered. They are made samples when the model is free for them."""
        number = 0
        while not feed.stopped:
            capture = self._open_capture()
            try:
                if not capture.isOpened():
                    feed.away("it cannot be opened")
                    continue
                while not feed.stopped:
                    there, frame = capture.read()
                    if not there:
                        break
                    feed.back()
                    number += 1
                    name = f"{self._name} frame {number}"
                    yield Item(name, partial(_sample, name, frame, feed))
            finally:
                capture.release()
            if not self.newest:
                return
            feed.away("it gives no more frames")

    def answered(self, mark: object) -> None:
        """Nothing to remember."""

    def close(self) -> None:
        """The camera is closed by the thread that reads it."""


def opencv_capture(place: str) -> Any:
    """A VideoCapture of a camera's number, a device, a URL or a file.

    Raises: ModuleNotFoundError without OpenCV.
    """
    import cv2  # noqa: PLC0415 - the extra [camera]

    # a camera that is away is said once, by us
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    capture = cv2.VideoCapture(int(place) if place.isdecimal() else place)
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # no old frames, where the driver can do without
    return capture


def _sample(name: str, frame: Array, feed: Feed) -> Array:
    """A frame (height, width, BGR) or (height, width) as the model takes pictures."""
    from PIL import Image  # noqa: PLC0415 - only sources of pictures need it

    if frame.dtype != np.uint8 or frame.ndim < 2 or frame.shape[2:] not in ((), (3,)):
        raise InputError(
            f"{name}: expected uint8 pixels (height, width, 3) or (height, width), got"
            f" {frame.dtype} of shape {frame.shape}"
        )
    picture = Image.fromarray(frame if frame.ndim == 2 else frame[..., ::-1].copy())
    return picture_sample(name, picture, feed.spec())
