"""The bundle that a device gets: its depth by the fleet's rule, in a published variant."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import cast

from profiles.allocation import Rule, allocate
from profiles.cost import CostTable
from profiles.device import DeviceProfile
from profiles.errors import AllocationError, InvalidProfileError
from server.backend.models import ServedModel
from server.registry.records import Device

logger = logging.getLogger(__name__)


def choose_bundle(
    device: Device, model: ServedModel, fleet: Iterable[Device], rule: str
) -> tuple[int, str]:
    """The depth and bundle name for `device`.

    The int8 variant is chosen if it is published, because an export measures it to be faster and
    to give the same answers. A device on which no prefix fits gets the shallowest one.
    """
    manifest = model.manifest
    cost = CostTable.from_dict(manifest.cost)
    profile = DeviceProfile.from_dict(device.profile)
    others = _profiles(fleet)
    try:
        depth = allocate(
            cast("Rule", rule), profile, cost, fleet=others, cuts=_published_cuts(model)
        )
    except (AllocationError, InvalidProfileError) as err:
        depth = _published_cuts(model)[0]
        logger.warning("device=%s gets the shallowest prefix: %s", device.id, err)
    quantised = f"d{depth}-int8"
    variant = quantised if quantised in manifest.variants else f"d{depth}"
    return depth, f"{manifest.name}/{manifest.version}/{variant}"


def _profiles(fleet: Iterable[Device]) -> list[DeviceProfile]:
    profiles = [DeviceProfile.from_dict(device.profile) for device in fleet]
    return [profile for profile in profiles if profile.link is not None]


def _published_cuts(model: ServedModel) -> tuple[int, ...]:
    return tuple(cut for cut in model.manifest.cuts if f"d{cut}" in model.manifest.variants)
