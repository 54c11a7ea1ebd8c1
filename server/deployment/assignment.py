"""Assignment of bundles to devices: the operator's pin, else what the fleet's rule chooses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from server.allocation import Choice, choose_bundle, depth_of, published_depths
from server.backend.models import ServedModel
from server.errors import BadRequestError, UnknownModelError
from server.registry.database import Registry
from server.registry.records import Device, Pin

logger = logging.getLogger(__name__)


class Assigner:
    """Chooses the bundle of every device.

    Args:
        wanted: the model of a fleet; None while there is none for it.
        published: the model of a name and version, if devices can fetch it.
        rule: of depths, "budget" or "supersfl".
    """

    def __init__(
        self,
        registry: Registry,
        *,
        wanted: Callable[[str], ServedModel | None],
        published: Callable[[str, str], ServedModel | None],
        rule: str,
    ) -> None:
        self._registry = registry
        self._wanted = wanted
        self._published = published
        self._rule = rule
        self._pins: dict[str, Pin] = {}  # those that were followed

    def choose(self, device: Device) -> Choice | None:
        """The bundle that `device` should run now; None while there is no model for it."""
        capability = self._registry.capabilities.of(device.id)
        pin = capability.pin
        if pin is not None and pin.bundle is not None:
            if self._has(pin.bundle):
                return Choice(depth_of(pin.bundle), pin.bundle, pinned=True)
            logger.warning(
                "device=%s is pinned to %s, which is not published: its fleet's rule chooses",
                *(device.id, pin.bundle),
            )
        model = self._wanted(device.fleet)
        if model is None:
            return None
        others = self._others(device)
        now = time.time()
        return choose_bundle(device, model, others, self._rule, capability=capability, now=now)

    def _others(self, device: Device) -> Iterator[Device]:
        """The rest of its fleet, read when the first one is asked for: few rules need them."""
        for other in self._registry.devices(device.fleet):
            if other.id != device.id and other.revoked_at is None:
                yield other

    def check_pin(self, device: Device, depth: int | None, bundle: str | None) -> None:
        """Check that the device could be pinned so.

        Raises: BadRequestError, UnknownModelError naming what is published.
        """
        if bundle is not None and not self._has(bundle):
            raise UnknownModelError(f"bundle {bundle[:200]}: not published by this server")
        model = self._wanted(device.fleet)
        if depth is not None and model is not None and depth not in published_depths(model):
            listed = ", ".join(map(str, published_depths(model)))
            raise BadRequestError(
                f"depth {depth}: {model.manifest.name}/{model.manifest.version} has bundles of the"
                f" depths {listed}"
            )

    def follow_pins(self, choose_again: Callable[[str], object]) -> None:
        """Choose again for every device that was pinned or unpinned since the last call.

        At the first call these are all that are pinned: the operator may have pinned them while the
        server was stopped. A device for which it fails is tried again at the next call.

        Args:
            choose_again: called with the id of each device.
        """
        pins = self._registry.capabilities.pinned()
        for device in sorted(pins.keys() | self._pins.keys()):
            if pins.get(device) == self._pins.get(device):
                continue
            choose_again(device)
            if device in pins:
                self._pins[device] = pins[device]
            else:
                del self._pins[device]

    def _has(self, bundle: str) -> bool:
        parts = bundle.split("/")
        model = self._published(parts[0], parts[1]) if len(parts) == 3 else None
        return model is not None and parts[2] in model.manifest.variants
