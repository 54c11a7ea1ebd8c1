"""Labels of a device in the order of the training's classes: by name, not by their place here.

A device with pictures of some classes only numbers these from 0, and another device other ones.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from edge_sdk.errors import ConfigurationError

logger = logging.getLogger(__name__)

SHOWN = 20


def class_numbers(own: Sequence[str], trained: Sequence[str]) -> tuple[int, ...]:
    """The training's label of each class of a device.

    The name decides where all of the device's names are known. Data that name no classes have
    their numbers as names, and keep them.

    Args:
        own: names of the device's classes, in the order of its labels.
        trained: names of the training's classes, in the order of its labels; empty where the
            trainer tells none: then the device's own order counts.
    Raises: ConfigurationError naming the classes that the training does not have.
    """
    if not trained or set(own) <= set(trained):
        place = {name: label for label, name in enumerate(trained or own)}
        return tuple(place[name] for name in own)
    if _are_numbers(own) and all(int(name) < len(trained) for name in own):
        return tuple(map(int, own))
    if _are_numbers(trained) and len(own) <= len(trained):
        logger.warning(
            "the training names no classes: the labels count in the order of the names here, %s",
            ", ".join(f"{label} {name}" for label, name in enumerate(own[:SHOWN])),
        )
        return tuple(range(len(own)))
    strange = [name for name in own if name not in trained]
    raise ConfigurationError(
        f"the data here have the classes {_listed(strange)}, which this training does not have;"
        f" expected names among {_listed(trained)}"
    )


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isascii() and name.isdigit() for name in names)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
