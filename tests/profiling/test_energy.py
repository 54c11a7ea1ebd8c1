"""Energy: small trees in the kernel's layout, clocks that the test turns."""

from __future__ import annotations

import os
import threading
import time
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from profiles.energy import EnergyMeter, PowerModel, reference_power
from profiles.errors import InvalidProfileError
from profiles.reference import reference_names
from tests.clock import Clock

MODEL = PowerModel(idle_w=2.0, busy_w=6.0, source="the test")
RANGE_UJ = 262_143_328_850


def zone(root: Path, entry: str, name: str, energy_uj: int) -> Path:
    folder = root / "sys/class/powercap" / entry
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (folder / "energy_uj").write_text(f"{energy_uj}\n")
    return folder / "energy_uj"


def hwmon(root: Path, rails: dict[str, tuple[int, int]]) -> Path:
    """An INA3221 as JetPack 5 shows it: millivolts and milliamperes by rail."""
    folder = root / "sys/class/hwmon/hwmon3"
    folder.mkdir(parents=True)
    (folder / "name").write_text("ina3221\n")
    for channel, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
        (folder / f"in{channel}_label").write_text(f"{label}\n")
        (folder / f"in{channel}_input").write_text(f"{millivolts}\n")
        (folder / f"curr{channel}_input").write_text(f"{milliamperes}\n")
    return folder


def test_rapl_adds_packages_and_their_memory_only(tmp_path: Path) -> None:
    package = zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 0)  # inside the package
    psys = zone(tmp_path, "intel-rapl:1", "psys", 0)  # around it
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0)  # the same once more
    clock = Clock(100.0)
    with EnergyMeter(root=tmp_path, clock=clock, declared=MODEL) as meter:
        package.write_text("12000000\n")
        memory.write_text("1500000\n")
        core.write_text("9000000\n")
        psys.write_text("9000000\n")
        clock.now += 3
        reading = meter.read()
    assert (reading.joules, reading.seconds, reading.source) == (7.5, 3, "rapl")
    assert reading.detail == "package-0, dram"


def test_a_counter_that_begins_again_is_followed(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    meter = EnergyMeter(root=tmp_path)
    meter.start()
    for value in (2_000_000, 5_000_000, 1_000_000):  # 3 J, 3 J, and once around less 4 J
        counter.write_text(str(value))
        reading = meter.read()
    assert reading.joules == pytest.approx(3 + 3 + RANGE_UJ / 1e6 - 4)
    meter.stop()


def test_a_jetson_is_read_at_its_input(tmp_path: Path) -> None:
    rails = {"VDD_IN": (5000, 1000), "VDD_CPU_GPU_CV": (5000, 300), "VDD_SOC": (5000, 200)}
    folder, clock = hwmon(tmp_path, rails), Clock(100.0)
    meter = EnergyMeter(root=tmp_path, clock=clock, declared=MODEL)
    assert meter.source == "ina"
    meter.start()
    (folder / "curr1_input").write_text("2000")  # 5 W, now 10 W
    clock.now += 2
    reading = meter.stop()
    # the meter's own thread may have looked before the clock moved: then all 2 s were at 10 W
    assert reading.joules in (pytest.approx(15), pytest.approx(20))
    assert reading.detail == "VDD_IN"


def test_rails_without_an_input_are_added_up(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, {"VDD_GPU_SOC": (20_000, 100), "NC": (1, 1), "VIN_SYS": (5000, 600)})
    (folder.parent / "hwmon0").mkdir()
    (folder.parent / "hwmon0/name").write_text("thermal\n")
    clock = Clock(100.0)
    with EnergyMeter(root=tmp_path, clock=clock) as meter:
        clock.now += 4
        reading = meter.read()
    assert reading.joules == pytest.approx(4 * (2 + 3))
    assert reading.detail == "VDD_GPU_SOC, VIN_SYS"


def test_an_older_jetson_has_iio_files(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    folder.mkdir(parents=True)
    for channel, (label, milliwatts) in enumerate({"POM_5V_IN": 2500, "POM_5V_GPU": 400}.items()):
        (folder / f"rail_name_{channel}").write_text(f"{label}\n")
        (folder / f"in_power{channel}_input").write_text(f"{milliwatts}\n")
    clock = Clock(100.0)
    with EnergyMeter(root=tmp_path, clock=clock) as meter:
        clock.now += 2
        assert meter.read().joules == pytest.approx(5)


def test_a_declared_model_is_fed_with_the_share_of_busy_cores(tmp_path: Path) -> None:
    clock, cpu = Clock(100.0), Clock(100.0)
    with EnergyMeter(root=tmp_path, declared=MODEL, clock=clock, cpu_clock=cpu) as meter:
        clock.now += 10
        cpu.now += 10 * (os.cpu_count() or 1) / 4  # a quarter of all cores
        reading = meter.read()
    assert reading.joules == pytest.approx(10 * (2 + 0.25 * 4))
    assert reading.source == "declared"
    assert reading.detail == "2 W idle, 6 W busy: the test"


def test_with_nothing_to_go_by_it_says_what_to_do(tmp_path: Path) -> None:
    with EnergyMeter(root=tmp_path) as meter:
        pass
    reading = meter.read()
    assert (reading.joules, reading.source, meter.source) == (None, "none", "none")
    declare = (
        "declare idle_w and busy_w ([energy] of a recipe, [power] of agent.toml) to have energy"
        " estimated"
    )
    assert reading.detail == declare


def test_counters_that_may_not_be_read_give_way_to_the_model(tmp_path: Path) -> None:
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    counter.unlink()
    counter.mkdir()  # root may read anything but a folder
    assert EnergyMeter(root=tmp_path, declared=MODEL).source == "declared"
    with EnergyMeter(root=tmp_path) as meter:
        pass
    assert str(counter) in meter.read().detail
    assert "let this user read it, or declare" in meter.read().detail


def test_a_sensor_that_falls_silent_stops_nothing(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, {"VDD_IN": (5000, 1000)})
    with EnergyMeter(root=tmp_path) as meter:
        (folder / "curr1_input").unlink()
        silent = meter.read()
        assert (silent.joules, silent.source) == (None, "none")
        assert silent.detail.startswith("ina failed:")
        (folder / "curr1_input").write_text("one")
        assert "expected a whole number" in meter.read().detail
        (folder / "curr1_input").write_text("1000")
        assert meter.read().joules is not None


def test_the_meter_looks_by_itself_between_readings(tmp_path: Path) -> None:
    folder = hwmon(tmp_path, {"VDD_IN": (5000, 1000)})
    meter = EnergyMeter(root=tmp_path)
    meter.start()
    (folder / "in1_input").write_text("50000")  # 50 W for half a second that no one asks in
    time.sleep(0.5)
    (folder / "in1_input").write_text("5000")
    reading = meter.stop()
    assert reading.joules is not None
    # with the two ends alone: 5 W all along
    assert reading.joules / reading.seconds > 30


def test_a_stopped_meter_keeps_its_reading_and_no_thread(tmp_path: Path) -> None:
    hwmon(tmp_path, {"VDD_IN": (5000, 1000)})
    clock = Clock(100.0)
    meter = EnergyMeter(root=tmp_path, clock=clock)
    for seconds in (1, 3):  # started again, it counts from 0
        meter.start()
        clock.now += seconds
        reading = meter.stop()
        clock.now += 50
        assert meter.read() is reading
        assert reading.joules == pytest.approx(5 * seconds)
    assert not any(thread.name == "energy" for thread in threading.enumerate())


def test_a_power_model_is_linear_and_checked() -> None:
    assert MODEL.energy_j(10) == 60
    assert MODEL.energy_j(10, 0) == 20
    with pytest.raises(InvalidProfileError, match=r"busy_w: expected at least idle_w \(2\)"):
        PowerModel(2, 1, "x")
    with pytest.raises(InvalidProfileError, match="idle_w"):
        PowerModel(-1, 1, "x")


def test_the_catalogues_power_models_are_of_its_boards_and_sourced() -> None:
    names = tomllib.loads((files("profiles") / "power.toml").read_text(encoding="utf-8"))
    assert set(names) <= set(reference_names())
    for name in names:
        model = reference_power(name)
        assert model is not None
        assert len(model.source) > 30
    assert reference_power("jetson-nano") is None
