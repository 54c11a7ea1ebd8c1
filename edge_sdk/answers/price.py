"""Joules of each answer: the share of the process's CPU time that it took, times watts of a core.

**CPU time.** While n answers are under way, each is charged 1/n of the CPU time that the process
uses, its network thread included. So an answer that waits for the server pays nothing for waiting
alone, and the charges of all answers add up to the CPU time of the process while there were any.

    I(t) = integral of dCPU / n        cpu_s of an answer = I(end) - I(begin)

**Watts of a core** are of the power above rest, because the device rests when no answer is under
way. They come from the first of these that there is:

    rapl, ina    counters or sensors of the board, calibrated while the agent runs (`Calibration`)
    declared     (busy_w - idle_w) / cores of a power model
    none         no watts are known: joules are None

A counter read around one answer would show noise: an answer takes microseconds, a sensor's sample
milliseconds. The radio is not CPU; `radio_j_per_mb` adds a declared price for its bytes.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.settings import Power
from profiles.energy import EnergyMeter, EnergySource

logger = logging.getLogger(__name__)

# Long against a sensor's sample (0.1 s), short against changes of the traffic.
WINDOW_S: Final = 2.0
# A window weighs half as much 70 windows later.
FORGETTING: Final = 0.99
WINDOWS_LEAST: Final = 10
# The slope counts while its standard error is at most this share of it.
ERROR_MOST: Final = 0.25


@dataclass(frozen=True, slots=True)
class EnergyReport:
    """Energy of an agent's answers since its start.

    Attributes:
        source: of the watts now; answers before may have had another, and some none.
        watts_per_core: above rest; None for the source `none`.
        rest_w: of the whole machine without this process, by its sensors; None without.
        joules: of all priced answers; `device`, `server`, `fallback` by their source.
        machine_joules: of the whole machine since the start, rest included; None without sensors.
        priced, unpriced: number of answers with joules, and without.
        detail: counters, rails or figures behind the watts; for `none`, what to do.
    """

    source: EnergySource
    watts_per_core: float | None
    rest_w: float | None
    joules: float
    device: float
    server: float
    fallback: float
    machine_joules: float | None
    priced: int
    unpriced: int
    detail: str


class Calibration:
    """The line through windows of time: power of the machine over busy cores of this process.

        P = rest_w + watts_per_core * cores        least squares, weighted by duration and age

    Work of other processes is part of rest_w, as long as it does not follow ours.
    """

    __slots__ = ("_c", "_cc", "_cp", "_p", "_pp", "_w", "windows")

    def __init__(self) -> None:
        self.windows = 0
        self._w = self._c = self._p = self._cc = self._cp = self._pp = 0.0

    def add(self, seconds: float, cpu_s: float, joules: float) -> None:
        """Take a window: its duration, the CPU time of this process, and the machine's energy."""
        if seconds <= 0:
            return
        c, p = cpu_s / seconds, joules / seconds
        self._w = FORGETTING * self._w + seconds
        self._c = FORGETTING * self._c + seconds * c
        self._p = FORGETTING * self._p + seconds * p
        self._cc = FORGETTING * self._cc + seconds * c * c
        self._cp = FORGETTING * self._cp + seconds * c * p
        self._pp = FORGETTING * self._pp + seconds * p * p
        self.windows += 1

    def line(self) -> tuple[float, float] | None:
        """`rest_w` and `watts_per_core`; None while the standard error of the slope is above
        ERROR_MOST of it: too few windows, or all with the same load.
        """
        if self.windows < WINDOWS_LEAST:
            return None
        mean_c, mean_p = self._c / self._w, self._p / self._w
        spread = self._cc / self._w - mean_c * mean_c
        if spread <= 1e-12:
            return None
        slope = (self._cp / self._w - mean_c * mean_p) / spread
        if slope <= 0:
            return None
        left = max(0.0, self._pp / self._w - mean_p * mean_p - slope * slope * spread)
        effective = min(self.windows, (1 + FORGETTING) / (1 - FORGETTING))
        error = math.sqrt(left / spread / max(effective - 2, 1))
        return None if error > ERROR_MOST * slope else (mean_p - slope * mean_c, slope)


class AnswerMeter:
    """Prices the answers of one agent. Any thread may call any method.

    Args:
        power: of the settings.
        root: folder of the platform's files.
        clock, cpu_clock: seconds; the second counts this process's time on all cores.
    """

    def __init__(
        self,
        power: Power,
        *,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._cpu_clock = cpu_clock
        self._radio_j = power.radio_j_per_mb / 1e6
        self._lock = threading.Lock()
        self._under_way = 0
        self._shared_s = 0.0  # I of the module's docstring
        self._seen_s = cpu_clock()
        self._joules = {"device": 0.0, "server": 0.0, "fallback": 0.0}
        self._priced = self._unpriced = 0
        self._calibration = Calibration()
        self._rest_w: float | None = None
        self._watts: float | None = None
        self._source: EnergySource = "none"
        model = power.model()
        if model is not None:
            self._watts = (model.busy_w - model.idle_w) / (os.cpu_count() or 1)
            self._source = "declared"
        self._declared = model
        self._meter = EnergyMeter(root=root, clock=clock) if power.sensors else None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start to read the sensors, if there are any, in a thread that takes windows."""
        if self._meter is None:
            return
        self._meter.start()
        self._window = (self._meter.read(), self._cpu_clock())
        if self._meter.source != "none":
            work = threading.Thread(target=self._watch, name="splitedge-power", daemon=True)
            self._thread = work
            work.start()

    def begin(self) -> float:
        """Count an answer as under way. Each `begin` is followed by one `end` or `drop`.

        Returns: a mark for `end`.
        """
        with self._lock:
            self._share()
            self._under_way += 1
            return self._shared_s

    def end(self, mark: float, source: str, size_bytes: int) -> tuple[float | None, EnergySource]:
        """Joules of an answer that is made now, and where their watts are from.

        Args:
            mark: of its `begin`.
            source: `device`, `server` or `fallback`.
            size_bytes: sent and received for it.
        """
        with self._lock:
            self._share()
            self._under_way -= 1
            if self._watts is None:
                self._unpriced += 1
                return None, "none"
            joules = (self._shared_s - mark) * self._watts + size_bytes * self._radio_j
            self._joules[source] += joules
            self._priced += 1
            return joules, self._source

    def drop(self) -> None:
        """Count an answer as no longer under way: it is not made."""
        with self._lock:
            self._share()
            self._under_way -= 1

    def report(self) -> EnergyReport:
        """The sums since the start, and the watts behind them."""
        reading = None if self._meter is None else self._meter.read()
        with self._lock:
            return EnergyReport(
                source=self._source,
                watts_per_core=self._watts,
                rest_w=self._rest_w,
                joules=sum(self._joules.values()),
                **self._joules,
                machine_joules=None if reading is None else reading.joules,
                priced=self._priced,
                unpriced=self._unpriced,
                detail=self._detail("" if reading is None else reading.detail),
            )

    def close(self) -> None:
        """End the thread and the reading of sensors."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        if self._meter is not None:
            self._meter.stop()

    def take_window(self) -> None:
        """Calibrate by the time since the last window, after `start`."""
        if self._meter is None:
            return
        before, cpu_before = self._window
        now, cpu_now = self._meter.read(), self._cpu_clock()
        if now.joules is None or before.joules is None:  # a sensor that failed may come back
            self._window = (now, cpu_now)
            return
        seconds = now.seconds - before.seconds
        self._calibration.add(seconds, cpu_now - cpu_before, now.joules - before.joules)
        self._window = (now, cpu_now)
        line = self._calibration.line()
        if line is not None:
            with self._lock:
                self._rest_w, self._watts = line
                self._source = now.source

    def _share(self) -> None:
        """Charge the CPU time since the last event to the answers under way."""
        now_s = self._cpu_clock()
        if self._under_way:
            self._shared_s += (now_s - self._seen_s) / self._under_way
        self._seen_s = now_s

    def _detail(self, sensors: str) -> str:
        if self._source in ("rapl", "ina"):
            return f"{sensors}, calibrated over {self._calibration.windows} windows"
        if self._declared is not None:
            model = self._declared
            return f"{model.idle_w:g} W idle, {model.busy_w:g} W busy: {model.source}"
        if self._thread is not None:
            return f"{sensors}: not calibrated yet; the load must vary for that"
        return sensors or "no sensors wanted, no idle_w and busy_w declared"

    def _watch(self) -> None:
        while not self._closing.wait(WINDOW_S):
            try:
                self.take_window()
            except Exception:  # outermost loop of this thread: answers go on without it
                logger.exception("the calibration of watts failed")
