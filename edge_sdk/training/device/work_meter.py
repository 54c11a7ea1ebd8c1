"""The cost of training on this device: seconds, core seconds, and joules where a meter tells."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from profiles.energy import EnergyMeter, EnergySource


class WorkMeter:
    """Adds up the cost of pieces of work; waiting for the trainer is none of it.

    Attributes:
        seconds: of work. cpu_s: of this process on all cores in that time.
        joules: of that work; None where the meter knows nothing.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        self.seconds = self.cpu_s = 0.0
        self.joules: float | None = None

    @property
    def source(self) -> EnergySource:
        """The meter's source of the joules."""
        return "none" if self.joules is None else self._meter.source

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count the block as one piece of work."""
        before, cpu_s = self._meter.read(), time.process_time()
        try:
            yield
        finally:
            after = self._meter.read()
            self.seconds += after.seconds - before.seconds
            self.cpu_s += time.process_time() - cpu_s
            if after.joules is not None and before.joules is not None:
                self.joules = (self.joules or 0.0) + after.joules - before.joules
