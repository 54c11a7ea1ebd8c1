"""What training costs this device: seconds, core seconds, and joules if they can be known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from profiles.energy import EnergyMeter, EnergySource


class WorkMeter:
    """Adds up the cost of pieces of work; waiting for the trainer is none of it.

    Attributes:
        seconds: of work. cpu_s: of this process on all cores meanwhile.
        joules: None where the meter has nothing to go by.
    """

    def __init__(self, meter: EnergyMeter) -> None:
        self._meter = meter
        self.seconds = self.cpu_s = 0.0
        self.joules: float | None = None

    @property
    def source(self) -> EnergySource:
        """How the joules are known."""
        return "none" if self.joules is None else self._meter.source

    @contextmanager
    def working(self) -> Iterator[None]:
        """One piece of work."""
        before, cpu_s = self._meter.read(), time.process_time()
        try:
            yield
        finally:
            after = self._meter.read()
            self.seconds += after.seconds - before.seconds
            self.cpu_s += time.process_time() - cpu_s
            if after.joules is not None and before.joules is not None:
                self.joules = (self.joules or 0.0) + after.joules - before.joules
