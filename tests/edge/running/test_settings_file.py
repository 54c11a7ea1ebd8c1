"""`agent.toml`: every setting is in the template, and what cannot be is refused by file and key."""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from edge_sdk import AgentSettings, Agreement, Budget
from edge_sdk.errors import ConfigurationError
from edge_sdk.records import read_record
from edge_sdk.settings import Learn, Power, Traces
from edge_sdk.settings_file.agent_tables import CONTROLLERS
from edge_sdk.settings_file.settings_file import SettingsFile
from edge_sdk.settings_file.template import (
    SETTINGS_NAME,
    settings_template,
    write_settings_template,
)

SETTING = re.compile(r"^#(?=[a-z_]+ = |\[\[)", re.MULTILINE)


def record_of(kind: Any) -> Any:
    """The record that a table is read into."""
    return get_args(kind)[0] if get_origin(kind) is tuple else kind


KINDS = {name: record_of(kind) for name, kind in get_type_hints(SettingsFile).items()}
RECORDS: dict[str, Any] = {**KINDS, **CONTROLLERS, "power": Power, "learn": Learn, "traces": Traces}
SHOWN = tomllib.loads(SETTING.sub("", settings_template()))


def default_of(field: Field[Any]) -> Any:
    made: Any = field.default_factory
    return made() if field.default is MISSING and made is not MISSING else field.default


def plain(record: Any) -> list[Field[Any]]:
    """Its fields that are keys of the table: the others are written as tables of their own."""
    own_tables = {"controller", "power", "learn", "traces"}
    return [each for each in fields(record) if each.name not in own_tables]


@pytest.mark.parametrize("name", RECORDS)
def test_every_setting_is_in_the_template(name: str) -> None:
    assert is_dataclass(RECORDS[name])
    shown = SHOWN[name]
    table = shown[0] if isinstance(shown, list) else shown
    assert set(table) == {field.name for field in plain(RECORDS[name])}


@pytest.mark.parametrize("name", RECORDS)
def test_template_shows_the_default_where_there_is_one(name: str) -> None:
    shown = SHOWN[name]
    table = shown[0] if isinstance(shown, list) else shown
    for field in plain(RECORDS[name]):
        if default_of(field) not in (None, MISSING, ()):
            assert table[field.name] == default_of(field), field.name


def test_template_sets_nothing(tmp_path: Path) -> None:
    write_settings_template(tmp_path)
    assert SettingsFile.load(tmp_path) == SettingsFile()
    assert (tmp_path / SETTINGS_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", RECORDS)
def test_what_the_template_shows_is_accepted(name: str) -> None:
    shown = SHOWN[name]
    table = shown[0] if isinstance(shown, list) else shown
    assert isinstance(read_record(RECORDS[name], table, name), RECORDS[name])


def test_existing_settings_are_kept(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_NAME).write_text("[agent]\nthreads = 2\n")
    write_settings_template(tmp_path)
    assert SettingsFile.load(tmp_path).agent == AgentSettings(threads=2)


def test_without_a_file_the_defaults_hold(tmp_path: Path) -> None:
    assert SettingsFile.load(tmp_path) == SettingsFile()


def test_controllers_are_tables_of_their_own() -> None:
    read = SettingsFile.from_toml(b'[budget]\nlimit = 3\nper = "second"\n').agent
    assert read.controller == Budget(3, per="second")
    read = SettingsFile.from_toml(b"[agent]\ndeadline_s = 2\n[agreement]\ndelta = 0.1").agent
    assert read == AgentSettings(deadline_s=2, controller=Agreement(0.1))


def test_answers_are_priced_once_a_key_of_power_is_set() -> None:
    assert SettingsFile.from_toml(b"[power]\n").agent.power is None
    read = SettingsFile.from_toml(b'[power]\nboard = "raspberry-pi-4"\nradio_j_per_mb = 5\n').agent
    assert read.power == Power(board="raspberry-pi-4", radio_j_per_mb=5)
    model = read.power.model()
    assert model is not None
    assert (model.idle_w, model.busy_w) == (2.7, 6.4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[agent]\ndeadline_s = 0\n", "[agent]: deadline_s: expected a finite number above 0"),
        ("[agent]\nthreads = 1.5\n", "[agent]: threads: expected a whole number"),
        ("[agent]\ndeadline = 1\n", "[agent]: unknown deadline; known are codec, "),
        ("[agent.controller]\nlimit = 1\n", "use the table [budget] or [agreement]"),
        ("agent = 3\n", "[agent]: expected a table, got 3"),
        ("[agents]\nthreads = 1\n", "unknown agents; known tables are [agent], [budget],"),
        ("threads = 1\n", "unknown threads; known tables are [agent]"),
        ("[budget]\ncost = 2\n", "[budget]: expected also limit"),
        ("[budget]\nlimit = 1\n[agreement]\ndelta = 0.1\n", "expected one of them, got both"),
        ("[agent]\nthreshold = 1\n[budget]\nlimit = 1\n", "threshold and controller"),
        ("[agent]\noffload = false\n[budget]\nlimit = 1\n", "controller needs offload"),
        ('[serve]\naddress = "8080"\n', "[serve]: address: expected HOST:PORT"),
        ('[serve]\naddress = "0.0.0.0:80"\n', "[serve]: address: other machines reach"),
        ('[serve]\ncert = "a.pem"\n', "[serve]: cert and key: expected both"),
        ("[serve]\nconnections = 0\n", "[serve]: connections: expected a whole number from 1"),
        ("[agent.power]\nidle_w = 1\n", "[agent]: unknown power; use the table [power]"),
        ("[power]\nidle_w = 1\n", "[power]: power: expected idle_w and busy_w, or neither"),
        ("[power]\nidle_w = 2\nbusy_w = 1\n", "busy_w: expected at least idle_w (2)"),
        ('[power]\nboard = "pi"\n', "no measured watts of 'pi' are known; give idle_w and busy_w"),
        ("[agent\n", "not a TOML file"),
        ("\x00", "not a TOML file"),
        ("[agent]\na" + ".a" * 2000 + " = 1\n", "a"),
        ("x = " + "[" * 100_000, "not a TOML file"),
    ],
)
def test_wrong_settings_name_the_file_the_table_and_the_key(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / SETTINGS_NAME
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        SettingsFile.load(tmp_path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_NAME).mkdir()
    with pytest.raises(ConfigurationError, match=r"agent\.toml: cannot be read"):
        SettingsFile.load(tmp_path)
    (tmp_path / SETTINGS_NAME).rmdir()
    (tmp_path / SETTINGS_NAME).write_bytes(b"#" * 2_000_000)
    with pytest.raises(ConfigurationError, match="at most 1000000 bytes"):
        SettingsFile.load(tmp_path)
