"""Energy of work in joules: counted, sampled or estimated.

The first of these sources that exists is used:

    rapl      counters of the CPU packages and their memory (Linux powercap, x86)
    ina       power sensors of a Jetson (INA3221; hwmon, or iio before JetPack 5), sampled
    declared  a power model: idle and busy watts of the recipe or the catalogue, and the share of
              the cores this process kept busy
    none      no source

Counters and sensors see the whole machine with all its processes, the model only this process.
Files are read below a root folder, so a test can pass a small tree.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Protocol, Self

from profiles.checks import number, text
from profiles.errors import InvalidProfileError
from profiles.fields import check_fields, exact_keys, need

EnergySource = Literal["rapl", "ina", "declared", "none"]

# a package at 300 W reaches the end of its counter (262 kJ) in 14 minutes
RAPL_INTERVAL_S: Final = 60.0
# an INA3221 takes milliseconds for a sample; work of a round lasts seconds
INA_INTERVAL_S: Final = 0.1
INPUT_RAILS: Final = ("VDD_IN", "POM_5V_IN")  # power of the whole module, if it has such a rail


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Watts of a board at rest and with all cores busy, and the source of the figures."""

    idle_w: float
    busy_w: float
    source: str

    def __post_init__(self) -> None:
        check_fields(
            self,
            "power model",
            source=text(1000),
            idle_w=number(least=0),
            busy_w=number(above=0),
        )
        need(
            self.busy_w >= self.idle_w,
            "power model",
            "busy_w",
            f"at least idle_w ({self.idle_w})",
            self.busy_w,
        )

    def energy_j(self, seconds: float, busy_share: float = 1.0) -> float:
        """Joules for so many seconds with that share of the cores busy.

        E = t * (P_idle + share * (P_busy - P_idle))
        """
        return seconds * (self.idle_w + busy_share * (self.busy_w - self.idle_w))


def declared_power(idle_w: float | None, busy_w: float | None, source: str) -> PowerModel | None:
    """The power model of watts that a user declares; None for one who declares none.

    Raises: InvalidProfileError for one of them alone, or for watts that cannot be.
    """
    if idle_w is None and busy_w is None:
        return None
    if idle_w is None or busy_w is None:
        raise InvalidProfileError("expected idle_w and busy_w, or neither")
    return PowerModel(idle_w, busy_w, source)


def reference_power(name: str) -> PowerModel | None:
    """The catalogue's power model of a board; None if no measurement is known."""
    text = Path(__file__).with_name("power.toml").read_text(encoding="utf-8")
    entry = tomllib.loads(text).get(name)
    if entry is None:
        return None
    owner = f"power model of {name}"
    checked = exact_keys(owner, entry, ["idle_w", "busy_w", "source"])
    return PowerModel(**checked)  # type: ignore[arg-type]  # the record checks its own fields


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Joules over a time, and the source of the figure.

    Attributes:
        joules: None for the source `none`.
        detail: the counters, rails or figures used; for `none`, why there is no source.
    """

    joules: float | None
    seconds: float
    source: EnergySource
    detail: str


class _Gauge(Protocol):
    """Reads a total that only grows."""

    source: EnergySource
    detail: str
    interval_s: float | None

    def total_j(self) -> float: ...


class EnergyMeter:
    """Measures joules between `start` and `stop` with the best source.

    with EnergyMeter(declared=reference_power("raspberry-pi-4")) as meter:
        ...
        meter.read()   # as often as wanted
    """

    def __init__(
        self,
        *,
        declared: PowerModel | None = None,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """Look for a source.

        Args:
            declared: power model to use if nothing can be measured.
            root: folder of the platform's files.
            clock, cpu_clock: seconds; the second counts this process's time on all cores.
        """
        self._clock = clock
        self._gauge, self._detail = _find_gauge(declared, root, clock, cpu_clock)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: EnergyReading | None = None
        self._begin_s = 0.0
        self._begin_j = 0.0

    @property
    def source(self) -> EnergySource:
        """The source in use."""
        return "none" if self._gauge is None else self._gauge.source

    def start(self) -> None:
        """Start counting from 0."""
        self._last = None
        self._stopped.clear()
        self._begin_s = self._clock()
        if self._gauge is not None:
            with contextlib.suppress(OSError, InvalidProfileError):  # `read` will say so
                self._begin_j = self._gauge.total_j()
            if self._gauge.interval_s is not None:
                self._thread = threading.Thread(target=self._keep, name="energy", daemon=True)
                self._thread.start()

    def read(self) -> EnergyReading:
        """Energy since `start`; after `stop`, until then."""
        if self._last is not None:
            return self._last
        seconds = self._clock() - self._begin_s
        if self._gauge is None:
            return EnergyReading(None, seconds, "none", self._detail)
        try:
            with self._lock:
                joules = self._gauge.total_j() - self._begin_j
        except (OSError, InvalidProfileError) as err:  # the work goes on without it
            return EnergyReading(None, seconds, "none", f"{self._gauge.source} failed: {err}")
        return EnergyReading(joules, seconds, self._gauge.source, self._gauge.detail)

    def stop(self) -> EnergyReading:
        """Stop counting; return the energy since `start`."""
        self._last = self.read()
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self._last

    def __enter__(self) -> Self:
        """Start."""
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop."""
        self.stop()

    def _keep(self) -> None:
        """Read often enough to see every change of power and every overflow of a counter."""
        assert self._gauge is not None
        while not self._stopped.wait(self._gauge.interval_s):
            # a failed sample is bridged by the next; `read` reports one that fails at the end
            with self._lock, contextlib.suppress(OSError, InvalidProfileError):
                self._gauge.total_j()


class _Rapl:
    """Sum of energy counters, in microjoules, that restart from 0 after their range."""

    source: EnergySource = "rapl"
    interval_s: float | None = RAPL_INTERVAL_S

    def __init__(self, zones: Sequence[Path]) -> None:
        self.detail = ", ".join(_text(zone / "name") for zone in zones)
        self._zones = zones
        self._ranges = [_number(zone / "max_energy_range_uj") for zone in zones]
        self._before = [_number(zone / "energy_uj") for zone in zones]
        self._total_uj = 0

    def total_j(self) -> float:
        for place, zone in enumerate(self._zones):
            now = _number(zone / "energy_uj")
            grown = now - self._before[place]
            self._total_uj += grown if grown >= 0 else grown + self._ranges[place]
            self._before[place] = now
        return self._total_uj / 1e6


class _Ina:
    """Power sensors, integrated by the trapezoidal rule."""

    source: EnergySource = "ina"
    interval_s: float | None = INA_INTERVAL_S

    def __init__(self, rails: dict[str, Callable[[], float]], clock: Callable[[], float]) -> None:
        self.detail = ", ".join(rails)
        self._rails = tuple(rails.values())
        self._clock = clock
        self._total_j = 0.0
        self._time_s, self._power_w = clock(), self._now_w()

    def total_j(self) -> float:
        now_s, now_w = self._clock(), self._now_w()
        self._total_j += (now_s - self._time_s) * (now_w + self._power_w) / 2
        self._time_s, self._power_w = now_s, now_w
        return self._total_j

    def _now_w(self) -> float:
        return sum(rail() for rail in self._rails)


class _Declared:
    """Estimates from a power model and the CPU time of this process."""

    source: EnergySource = "declared"
    interval_s: float | None = None

    def __init__(
        self, model: PowerModel, clock: Callable[[], float], cpu_clock: Callable[[], float]
    ) -> None:
        cores = os.cpu_count() or 1
        self.detail = f"{model.idle_w:g} W idle, {model.busy_w:g} W busy: {model.source}"
        self._model, self._cores = model, cores
        self._clock, self._cpu_clock = clock, cpu_clock
        self._begin_s, self._begin_cpu_s = clock(), cpu_clock()

    def total_j(self) -> float:
        seconds = self._clock() - self._begin_s
        busy_s = (self._cpu_clock() - self._begin_cpu_s) / self._cores
        return self._model.energy_j(seconds, min(1.0, busy_s / seconds) if seconds > 0 else 0.0)


def _find_gauge(
    declared: PowerModel | None,
    root: Path,
    clock: Callable[[], float],
    cpu_clock: Callable[[], float],
) -> tuple[_Gauge | None, str]:
    """The best gauge; or None, and why there is none."""
    denied = ""
    try:
        if zones := _rapl_zones(root):
            return _Rapl(zones), ""
    except OSError as err:  # since Linux 5.10 only root may read the counters
        denied = f"{err.filename}: {err.strerror}; let this user read it, or "
    try:
        if rails := _ina_rails(root):
            return _Ina(rails, clock), ""
    except OSError as err:
        denied = f"{err.filename}: {err.strerror}; "
    if declared is not None:
        return _Declared(declared, clock, cpu_clock), ""
    advice = "declare idle_w and busy_w ([energy] of a recipe, [power] of agent.toml)"
    return None, f"{denied}{advice} to have energy estimated"


def _rapl_zones(root: Path) -> list[Path]:
    """Zones of packages and their memory; cores are parts of packages, psys contains all."""
    zones = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
    return [zone for zone in zones if _text(zone / "name").startswith(("package-", "dram"))]


def _ina_rails(root: Path) -> dict[str, Callable[[], float]]:
    """A function for each rail that reads its watts; the module's input alone if it is measured."""
    rails: dict[str, Callable[[], float]] = {}
    for chip in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        if _text(chip / "name") == "ina3221":
            for channel in (1, 2, 3):
                label = _text(chip / f"in{channel}_label")
                if label and label != "NC" and (chip / f"curr{channel}_input").is_file():
                    rails[label] = _volts_times_amperes(chip, channel)
    for chip in sorted((root / "sys/bus/i2c/drivers/ina3221x").glob("*/iio:device*")):
        for channel in (0, 1, 2):
            label = _text(chip / f"rail_name_{channel}")
            if label and label != "NC":
                rails[label] = _milliwatts(chip / f"in_power{channel}_input")
    whole = [label for label in rails if label in INPUT_RAILS]
    return {label: rails[label] for label in whole or rails}


def _volts_times_amperes(chip: Path, channel: int) -> Callable[[], float]:
    volts, amperes = chip / f"in{channel}_input", chip / f"curr{channel}_input"
    return lambda: _number(volts) * _number(amperes) / 1e6  # millivolts, milliamperes


def _milliwatts(path: Path) -> Callable[[], float]:
    return lambda: _number(path) / 1e3


def _number(path: Path) -> int:
    text = path.read_text(encoding="ascii")
    try:
        return int(text)
    except ValueError as err:
        raise InvalidProfileError(f"{path}: expected a whole number, got {text!r:.50}") from err


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
