"""A server whose clock is wrong: it starts and infers, and signs nothing until it is right."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fastapi.testclient import TestClient
from tuf.api.metadata import Metadata, Root, Timestamp

from edge_sdk.installation import BUILD_DATE
from edge_sdk.wire.address import Address
from profiles import load_reference
from server.app import create_app
from server.errors import ArtifactError, ClockError, NotReadyError
from server.registry.operator import load_operator_secret
from server.services import Services
from server.settings import ServerSettings
from server.signing import clock as signing_clock
from server.signing.artifacts import ArtifactRepository
from server.signing.clock import clock_problem
from server.signing.report import ExpiryWarnings, problems
from server.tokens import create_token
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

FREE = Address("127.0.0.1", 0)
YEAR = timedelta(days=365)
IN_1970 = datetime(1970, 1, 2, tzinfo=UTC)
TODAY = BUILD_DATE + timedelta(days=100)


class SetClock:
    """A clock that says what it is told."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def __call__(self) -> datetime:
        return self.at


@pytest.mark.parametrize(
    ("now", "last_signed", "why"),
    [
        (IN_1970, None, "before its release was built"),
        (IN_1970, TODAY, "before its release was built"),
        (BUILD_DATE, None, None),
        (TODAY, None, None),
        (TODAY + 4 * YEAR, None, None),
        (TODAY + 10 * YEAR, None, "too long after its release was built"),
        (TODAY, TODAY - timedelta(hours=1), None),
        (TODAY, TODAY + timedelta(days=200), None),  # set back, after it had jumped
        (TODAY + timedelta(days=360), TODAY, None),  # switched off for most of a year
        (TODAY + 10 * YEAR, TODAY, "trust-clock"),
        (TODAY, IN_1970, None),  # an earlier release signed in 1970
    ],
)
def test_which_clocks_are_right_enough_to_sign_by(
    now: datetime, last_signed: datetime | None, why: str | None
) -> None:
    problem = clock_problem(now, last_signed)
    assert (problem is None) == (why is None)
    assert why is None or why in str(problem)


@pytest.fixture
def clock() -> SetClock:
    return SetClock(TODAY)


@pytest.fixture
def repository(tmp_path: Path, clock: SetClock) -> ArtifactRepository:
    return ArtifactRepository(tmp_path / "state", clock=clock)


def root_of(repository: ArtifactRepository) -> Root:
    return Metadata[Root].from_bytes(repository.root_bytes).signed


def timestamp_of(repository: ArtifactRepository) -> bytes:
    return (repository.metadata_folder / "timestamp.json").read_bytes()


@pytest.mark.parametrize("wrong", [IN_1970, TODAY + 10 * YEAR])
def test_first_start_with_a_wrong_clock_signs_nothing_until_it_is_right(
    repository: ArtifactRepository, clock: SetClock, wrong: datetime
) -> None:
    """FAULTS row 12: a root of 1970 would expire in 1979, and no device could enrol, for good."""
    clock.at = wrong
    with pytest.raises(ClockError):
        repository.open_or_create()
    assert list(repository.metadata_folder.iterdir()) == []
    clock.at = TODAY
    repository.open_or_create()
    assert root_of(repository).expires == TODAY + 10 * YEAR


@pytest.mark.parametrize("wrong", [IN_1970, TODAY + 10 * YEAR])
def test_clock_that_jumps_leaves_what_is_signed_as_it_is(
    repository: ArtifactRepository, clock: SetClock, wrong: datetime
) -> None:
    """FAULTS row 12: neither metadata that is over at once, nor metadata good for ten years."""
    repository.open_or_create()
    before = timestamp_of(repository)
    clock.at = wrong
    for act in (repository.open_or_create, repository.refresh_timestamp, repository.rotate):
        with pytest.raises(ClockError):
            act()
    with pytest.raises(ClockError):
        repository.root_for_enrolment()
    assert timestamp_of(repository) == before
    assert root_of(repository).version == 1
    clock.at = TODAY + timedelta(hours=1)
    repository.open_or_create()
    renewed = Metadata[Timestamp].from_bytes(timestamp_of(repository)).signed
    assert renewed.version == Metadata[Timestamp].from_bytes(before).signed.version + 1
    assert renewed.expires == clock.at + timedelta(days=7)


def test_operator_can_say_that_a_clock_far_ahead_is_right(
    repository: ArtifactRepository, clock: SetClock
) -> None:
    repository.open_or_create()
    clock.at = IN_1970
    with pytest.raises(ClockError):  # no operator can know better than the release
        repository.trust_clock()
    clock.at = TODAY + 3 * YEAR
    repository.trust_clock()
    repository.open_or_create()
    assert {end > clock.at for end in repository.expiries().values()} == {True}


def test_no_clock_is_trusted_before_a_server_has_run(repository: ArtifactRepository) -> None:
    """The first root may be meant to be made offline."""
    with pytest.raises(ArtifactError, match=r"there is no root yet.*start the server"):
        repository.trust_clock()
    assert repository.roots.newest_version == 0
    assert not list(repository.keys_folder.glob("*.pem"))


def test_no_token_is_made_by_a_wrong_clock(
    repository: ArtifactRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made in ten years, a token of an hour would enrol a device for ten years."""
    repository.open_or_create()
    monkeypatch.setattr(signing_clock, "BUILD_DATE", datetime.now(UTC) + YEAR)
    with pytest.raises(ClockError, match="before its release was built"):
        create_token(tmp_path / "state")


def test_root_of_1970_is_mended_by_renewing_it(
    repository: ArtifactRepository, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS row 12: states that an earlier release made."""
    clock.at = IN_1970
    with monkeypatch.context() as earlier_release:
        earlier_release.setattr(signing_clock, "BUILD_DATE", IN_1970)
        repository.open_or_create()
    assert root_of(repository).expires.year == 1979
    clock.at = TODAY
    repository.open_or_create()
    with pytest.raises(NotReadyError, match="splitedge server root renew"):
        repository.root_for_enrolment()
    assert "the root expired on 1979-12-31" in problems(repository)[0]
    repository.rotate()
    assert root_of(repository).expires == TODAY + 10 * YEAR
    assert problems(repository) == []
    assert repository.root_for_enrolment() == repository.root_bytes


def test_what_expires_within_30_days_is_warned_of_once_a_day(
    repository: ArtifactRepository, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    repository.open_or_create()
    end = root_of(repository).expires
    warnings = ExpiryWarnings(clock)
    caplog.set_level(logging.WARNING)

    def warned_on(day: datetime) -> int:
        caplog.clear()
        clock.at = day
        if repository.clock_problem is not None:
            repository.trust_clock()
        repository.open_or_create()
        warnings.log(repository)
        return len(caplog.records)

    assert warned_on(end - timedelta(days=31)) == 0
    first = end - timedelta(days=29)
    assert [warned_on(first + timedelta(hours=h)) for h in (0, 1, 23, 24, 25)] == [1, 0, 0, 1, 0]


def test_metadata_that_cannot_be_signed_again_is_warned_of(
    repository: ArtifactRepository, clock: SetClock
) -> None:
    repository.open_or_create()
    clock.at = TODAY + timedelta(days=5)
    (late,) = problems(repository)
    assert "the timestamp expires on" in late
    assert "its log says why" in late


@pytest.fixture
def services(exported: Exported, tmp_path: Path, clock: SetClock) -> Iterator[Services]:
    """A server with `digits/1` that starts in 1970."""
    clock.at = IN_1970
    exported.install(tmp_path / "state" / "models")
    settings = ServerSettings(tmp_path / "state", FREE, FREE, threads=1)
    running = Services(settings, clock=clock)
    running.start()
    yield running
    running.stop()


@pytest.mark.broker
@pytest.mark.deadline
def test_server_started_in_1970_infers_and_enrols_once_its_clock_is_right(
    services: Services,
    clock: SetClock,
    exported: Exported,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FAULTS row 12: no restart is needed, and a device that came too early keeps its token."""
    body = {
        "token": services.registry.create_token(),
        "profile": load_reference("raspberry-pi-4").to_dict(),
    }
    operator = {"Authorization": f"Bearer operator:{load_operator_secret(tmp_path / 'state')}"}
    query = {
        "inputs": [
            {
                "name": "x",
                "shape": [1, 1, 8, 8],
                "datatype": "UINT8",
                "data": exported.x[:1].ravel().tolist(),
            }
        ]
    }
    with TestClient(create_app(services)) as client:
        assert client.get("/v2/health/ready").status_code == 200
        assert client.post("/v2/models/digits/infer", json=query).status_code == 200
        early = client.post("/api/v1/enroll", json=body)
        assert early.status_code == 503
        assert early.headers["Retry-After"] == "60"
        assert "says 1970-01-02" in early.json()["error"]
        no_token = client.post("/api/v1/tokens", json={}, headers=operator)
        assert no_token.status_code == 503
        state = client.get("/api/v1/signing", headers=operator).json()
        assert (state["signs"], state["root_version"]) == (False, 0)
        assert "1970-01-02" in state["problems"][0]

        clock.at = TODAY
        wait_until(
            lambda: services.publisher.published("digits", "1") is not None, "it does not sign", 10
        )
        enrolled = client.post("/api/v1/enroll", json=body)
        assert enrolled.status_code == 201, enrolled.text
        assert enrolled.json()["bundle"].startswith("digits/1/")
        state = client.get("/api/v1/signing", headers=operator).json()
        assert (state["signs"], state["root_version"], state["problems"]) == (True, 1, [])
        assert client.get("/api/v1/signing").status_code == 401
    said = [record for record in caplog.records if "says 1970-01-02" in record.getMessage()]
    assert len([record for record in said if "signing:" in record.getMessage()]) <= 1
