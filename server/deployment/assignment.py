"""Assignment of bundles to devices: the one place that chooses.

The operator's pin comes first, then what a roll-out wants of the device, then its fleet's model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from server.allocation import (
    Choice,
    choose_bundle,
    depth_of,
    held_depths,
    published_depths,
)
from server.backend.models import StoredModel
from server.errors import BadRequestError, UnknownModelError
from server.registry.database import Registry
from server.registry.records import Capability, Device, Pin
from server.registry.rollouts.targets import Target, target_of, targets_of

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
        wanted: Callable[[str], StoredModel | None],
        published: Callable[[str, str], StoredModel | None],
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
        now = time.time()
        target = self._target(device)
        if target is not None and target.bundle is not None:
            back = self._way_back(target.bundle, capability, now)
            if back is not None:
                return back
        model = self._model(device, target)
        if model is None:
            return None
        others = self._others(device)
        return choose_bundle(device, model, others, self._rule, capability=capability, now=now)

    def versions(self, devices: Iterable[Device]) -> dict[str, str]:
        """The version that each device should run, `MODEL/VERSION`, by id; pins are left out.

        Devices for which there is no model yet are left out too.
        """
        devices = list(devices)
        orders = self._registry.rollouts.orders()
        fleets = {device.fleet for device in devices}
        catalogue = self._registry.catalogue
        wanted = {fleet: catalogue.wanted(fleet) for fleet in fleets} if orders else {}
        targets = targets_of(orders, devices, wanted)
        models = {fleet: self._wanted(fleet) for fleet in fleets}
        found = {}
        for device in devices:
            target = targets.get(device.id)
            model = None if target is None else self._published(*target.version.split("/"))
            model = models[device.fleet] if model is None else model
            if model is not None:
                found[device.id] = f"{model.manifest.name}/{model.manifest.version}"
        return found

    def _target(self, device: Device) -> Target | None:
        """Target that roll-outs set for a device."""
        orders = self._registry.rollouts.orders(device.id)
        fleet = self._registry.catalogue.wanted(device.fleet) if orders else None
        return None if fleet is None else target_of(orders, fleet)

    def _model(self, device: Device, target: Target | None) -> StoredModel | None:
        """The model from which a device gets its bundle: a roll-out's, else its fleet's."""
        if target is not None:
            model = self._published(*target.version.split("/"))
            if model is not None:
                return model
            logger.warning(
                "device=%s should run %s, which is not published: its fleet's model is chosen",
                *(device.id, target.version),
            )
        return self._wanted(device.fleet)

    def _way_back(self, bundle: str, capability: Capability, now: float) -> Choice | None:
        """The very bundle that a device ran before a roll-out, if it can run it still."""
        name, version, _ = bundle.split("/")
        model = self._published(name, version)
        if model is None or not self._has(bundle):
            return None
        depth, pin = depth_of(bundle), capability.pin
        moved = pin is not None and pin.depth not in (None, depth)
        if moved or depth in held_depths(model, capability.failures, now):
            return None
        return Choice(depth, bundle)

    def _others(self, device: Device) -> Iterator[Device]:
        """The rest of its fleet, read when the first one is asked for: few rules need them."""
        for other in self._registry.devices(device.fleet):
            if other.id != device.id and other.active:
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
