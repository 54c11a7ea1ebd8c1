"""A real browser on a real server: the pages are clicked through, on a desk and on a phone."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
from playwright.sync_api import Browser, Page, expect

from benchmarks.dashboard.simulated import SimulatedDevice
from profiles import load_reference
from profiles.measured import Conditions
from server.registry.database import Registry
from server.registry.rollouts.records import RolloutPlan
from server.registry.sign_in.sign_ins import SignIns
from server.registry.telemetry.history import LastReading
from server.registry.telemetry.reading import Reading
from server.state import existing_registry
from tests.serving.dashboard.test_facts import ROUND
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported, ServerRun

DESK = {"width": 1280, "height": 860}
PHONE = {"width": 390, "height": 844}
# the buttons that change something, as far as these pages can show them
ACTS = {
    *("Add a device", "Approve", "Reject", "Rename", "New credential", "Revoke", "Pin", "Unpin"),
    *("Let it try again", "Activate", "Roll back", "Change", "Start a roll-out"),
}
REVOKE = """() => fetch("dashboard/actions/devices/pi-3/revoke", {method: "POST"})
    .then((answer) => answer.status)"""
PAGES = ("Fleet", "Models", "Roll-outs", "Training", "Alerts", "Audit")

expect.set_options(timeout=20_000)  # a busy machine is no failure


@dataclass
class Visit:
    """A signed-in page of a running server.

    Attributes:
        trouble: what the browser's console said, and errors of scripts.
        asked: addresses that the browser asked.
    """

    page: Page
    registry: Registry
    trouble: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def go(self, words: str) -> None:
        """Open a page by its address."""
        self.page.evaluate("words => { location.hash = words }", f"#/{words}")

    def act(self, button: str, yes: str | None = None) -> None:
        """Click a button, and answer its question with yes."""
        self.page.get_by_role("button", name=button, exact=True).first.click()
        dialog = self.page.get_by_role("dialog")
        dialog.get_by_role("button", name=yes or button, exact=True).click()
        expect(dialog).to_have_count(0)


@pytest.fixture(scope="module")
def server(
    exported: Exported, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerRun, Path]]:
    """A running server with a model, three devices, one that waits, and a training."""
    from tests.serving.conftest import ServerRun

    state = tmp_path_factory.mktemp("watched") / "state"
    exported.install(state / "models")
    free = ("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0")
    run = ServerRun(state, free, state.with_name("log")).wait_ready()
    training = state / "training" / "yard-run"
    training.mkdir(parents=True)
    rounds = [{**ROUND, "round": n, "accuracy": 0.1 * n, "loss": 2.0 / n} for n in (1, 2, 3)]
    (training / "log.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rounds)))
    with existing_registry(state) as registry:
        for name, fleet in (("pi-1", "kitchen"), ("pi-2", "yard"), ("pi-3", "yard")):
            enrol(registry, name, fleet)
            registry.touch(name)
            now = Conditions("digits/1/d1", 200_000_000, 0.8, 3.0, 40.0)
            registry.capabilities.report_conditions(name, now)
            registry.reports.note_running({name: "digits/1/d1"})
        registry.reports.note_update("pi-3", "digits/1/d1", "digits/1/d2", "golden inputs")
        simulated = SimulatedDevice("pi-2", "digits/1/d1", seed=0)
        for minutes in (3, 2, 1):
            reading = Reading.from_heartbeat(simulated.heartbeat(60.0))
            last = LastReading(time.time() - 60 * minutes, reading)
            registry.telemetry.record({"pi-2": last})
        enrol(registry, "pi-4", "yard", approve=True)
    try:
        yield run, state
    finally:
        assert run.end() == 0, run.stderr


def enrol(registry: Registry, name: str, fleet: str, *, approve: bool = False) -> None:
    token = registry.create_token(fleet, approve=approve)
    registry.redeem_token(token, name, load_reference("raspberry-pi-4").to_dict())


@contextmanager
def visit(
    browser: Browser,
    http: str,
    state: Path,
    size: dict[str, int],
    *,
    name: str | None = "anna",
    reads_only: bool = False,
) -> Iterator[Visit]:
    with existing_registry(state) as registry, contextlib.ExitStack() as stack:
        context = browser.new_context(viewport=size)  # type: ignore[arg-type]  # a plain dict
        stack.callback(context.close)
        made = Visit(context.new_page(), registry)
        made.page.on("console", lambda message: made.trouble.append(message.text))
        made.page.on("pageerror", lambda error: made.trouble.append(str(error)))
        made.page.on("request", lambda request: made.asked.append(request.url))
        link = registry.sign_ins.new_link(name, reads_only=reads_only)
        made.page.goto(f"{http}/#/sign-in/{link}")
        expect(made.page.get_by_role("heading", name="Fleet")).to_be_visible()
        yield made
        assert made.trouble == []
        assert {url for url in made.asked if not url.startswith(f"{http}/")} == set()


@pytest.fixture
def desk(chromium: Browser, server: tuple[ServerRun, Path]) -> Iterator[Visit]:
    """A person at a desk."""
    with visit(chromium, server[0].http, server[1], DESK) as made:
        yield made


@pytest.fixture
def phone(chromium: Browser, server: tuple[ServerRun, Path]) -> Iterator[Visit]:
    """A person with a phone."""
    with visit(chromium, server[0].http, server[1], PHONE) as made:
        yield made


def test_the_link_that_a_server_prints_signs_in_once(
    chromium: Browser, server: tuple[ServerRun, Path]
) -> None:
    run, _ = server
    printed = run.read_line()
    found = re.search(rf"{re.escape(run.http)}/#/sign-in/\S+", printed)
    assert found is not None, printed
    for nth, heading in ((1, "Fleet"), (2, "splitedge")):
        page = chromium.new_page()
        page.goto(found[0])
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        if nth == 1:
            assert "sign-in" not in page.url, "the link must not stay in the history"
            page.reload()
            expect(page.get_by_role("heading", name="Fleet")).to_be_visible()
            page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_text("splitedge server dashboard-link").first).to_be_visible()
        page.close()


def test_an_address_that_is_none_shows_the_fleet(desk: Visit) -> None:
    desk.go("%")
    desk.page.reload()
    expect(desk.page.get_by_role("heading", name="Fleet")).to_be_visible()


def test_the_fleet_is_found_filtered_and_sorted(desk: Visit) -> None:
    page = desk.page
    table = page.get_by_role("table", name="Devices")
    expect(table.get_by_role("row")).to_have_count(4)
    page.get_by_label("Find").fill("refused")
    expect(table.get_by_role("row")).to_have_count(2)
    page.get_by_label("Find").fill("")
    page.get_by_label("Fleet", exact=True).select_option("yard")
    expect(table.get_by_role("row")).to_have_count(3)
    page.get_by_label("Fleet", exact=True).select_option("")
    first = table.get_by_role("row").nth(1)
    expect(first).to_contain_text("pi-1")
    table.get_by_role("button", name="Device").click()
    expect(first).to_contain_text("pi-3")
    expect(first).to_contain_text("refused digits/1/d2")


def test_a_device_is_approved_pinned_and_shut_out(desk: Visit) -> None:
    page = desk.page
    desk.act("Approve")
    expect(page.get_by_role("link", name="pi-4")).to_be_visible()
    page.get_by_role("link", name="pi-3").click()
    expect(page.get_by_role("heading", name="pi-3")).to_be_visible()
    expect(page.get_by_text("golden inputs").first).to_be_visible()
    desk.act("Pin")
    expect(page.get_by_text("you: pinned to digits/1/d1")).to_be_visible()
    desk.act("Let it try again")
    expect(page.get_by_text("Ordered", exact=False)).to_contain_text("digits/1/d2")
    desk.act("Unpin")
    desk.act("New credential")
    page.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_label("Title").fill("Gate <b>camera</b>")
    page.get_by_label("Title").press("Enter")
    expect(page.get_by_role("heading", name="Gate <b>camera</b>")).to_be_visible()
    assert desk.registry.titles.give("pi-3", "") is None  # as the other tests know it
    desk.go("device/pi-4")
    desk.act("Revoke")
    expect(page.get_by_text("Revoked", exact=False).first).to_be_visible()
    assert not desk.registry.device("pi-4").active
    acted = {one.what for one in desk.registry.trail.entries(50, who="operator:anna")}
    assert acted >= {
        *("device.approve", "device.pin", "quarantine.lift", "device.rename", "device.revoke"),
    }


def test_a_devices_answers_are_drawn(desk: Visit) -> None:
    page = desk.page
    expect(page.get_by_role("img", name="Answers a minute", exact=False)).to_be_visible()
    page.get_by_role("link", name="pi-2").click()
    expect(page.get_by_role("img", name="Histogram", exact=False)).to_be_visible()
    expect(page.get_by_role("img", name="Share of answers", exact=False)).to_be_visible()
    page.get_by_role("tab", name="day", exact=True).click()
    expect(page.get_by_text("answers:", exact=False)).to_contain_text("exits")
    old = re.compile("answers with digits.1.d1; .*outlines show the held-out samples")
    expect(page.get_by_role("img", name=old)).to_be_visible()
    updated = Reading.from_heartbeat(SimulatedDevice("pi-2", "digits/1/d2", 1).heartbeat(60.0))
    desk.registry.telemetry.record({"pi-2": LastReading(time.time(), updated)})
    count = sum(updated.counts[source] for source in ("exits", "offloads", "fallbacks"))
    new = re.compile(rf"of {count} answers with digits.1.d2; .*held-out samples")
    expect(page.get_by_role("img", name=new)).to_be_visible()
    expect(page.get_by_text("answers since the update to digits/1/d2")).to_be_visible()
    desk.go("device/pi-1")
    expect(page.get_by_text("No heartbeat came in this time", exact=False)).to_be_visible()


def test_figures_of_an_hour_are_not_shown_as_those_of_a_month(desk: Visit) -> None:
    page = desk.page
    desk.go("device/pi-2")
    answers = page.get_by_text("answers:", exact=False)
    expect(answers).to_contain_text("exits")
    page.context.set_offline(True)
    page.get_by_role("tab", name="30 days", exact=True).click()
    expect(page.get_by_text("The server does not answer", exact=False).first).to_be_visible()
    expect(answers).to_have_count(0)
    page.context.set_offline(False)
    expect(answers).to_contain_text("exits")
    desk.trouble.clear()  # the browser says that it was offline


def test_a_browser_whose_clock_is_set_right_is_believed(desk: Visit) -> None:
    page = desk.page
    early = datetime.now(UTC) - timedelta(hours=8)
    page.clock.set_system_time(early)  # as before NTP has answered
    module = "document.querySelector('link[href$=\"/server.js\"]').href"
    shown = f"import({module}).then((server) => [server.now(), Date.now() / 1000])"

    def corrected() -> bool:
        now, clock = page.evaluate(shown)
        return bool(abs(now - time.time()) < 5 < abs(clock - time.time()))

    wait_until(corrected, "the page believes the clock")
    page.clock.set_system_time(datetime.now(UTC))
    wait_until(
        lambda: abs(page.evaluate(shown)[0] - time.time()) < 5,
        "the page still corrects a clock that is right",
    )


def test_a_question_that_is_not_answered_changes_nothing(desk: Visit) -> None:
    page = desk.page
    page.get_by_role("link", name="pi-1").click()
    page.get_by_role("button", name="Revoke").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Revoke").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert desk.registry.device("pi-1").active


def test_a_curve_is_drawn_and_a_fleet_is_given_a_version(desk: Visit) -> None:
    page = desk.page
    page.get_by_role("link", name="Models").click()
    expect(page.get_by_role("img", name="Operating curve", exact=False)).to_be_visible()
    expect(page.locator("canvas")).to_have_count(1)
    page.get_by_role("tab", name="2 stages").click()
    expect(page.get_by_text("digits/1/d2", exact=True)).to_be_visible()
    row = page.get_by_role("row").filter(has_text="yard").last
    row.get_by_role("button", name="Change").click()
    page.get_by_label("Model", exact=True).select_option("digits/1")
    page.get_by_role("button", name="Assign").click()
    expect(page.get_by_text("stays at this version")).to_be_visible()
    assert desk.registry.catalogue.wanted("yard").pinned


def test_a_roll_out_is_refused_with_its_reason(desk: Visit) -> None:
    page = desk.page
    page.get_by_role("link", name="Roll-outs").click()
    page.get_by_role("button", name="Start a roll-out").click()
    page.get_by_label("Health").fill("nonsense")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("nonsense")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert desk.registry.rollouts.all() == ()
    desk.trouble.clear()  # the browser says that the answer was a 400


def test_rounds_and_the_audit_log_are_shown(desk: Visit) -> None:
    page = desk.page
    page.get_by_role("link", name="Training").click()
    expect(page.get_by_role("heading", name="yard-run")).to_be_visible()
    expect(page.get_by_text("it is away").first).to_be_visible()
    expect(page.locator("canvas")).to_have_count(4)
    page.get_by_role("link", name="Audit").click()
    page.get_by_label("Kind").select_option("dashboard.")
    expect(page.get_by_text("dashboard.sign-in").first).to_be_visible()
    expect(page.get_by_text("device.enrol")).to_have_count(0)
    page.get_by_label("About").fill("digits/2")
    expect(page.get_by_text("A model's name goes without its version")).to_be_visible()
    page.get_by_label("About").fill("PI-2")
    expect(page.get_by_text("A model's name goes without its version")).to_have_count(0)
    expect(page.get_by_text("No such entries.")).to_be_visible()


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_who_reads_finds_no_button_and_is_refused_by_the_server(
    chromium: Browser, server: tuple[ServerRun, Path], size: dict[str, int]
) -> None:
    run, state = server
    with visit(chromium, run.http, state, size, reads_only=True) as reader:
        page = reader.page
        shown = page.locator(".person").filter(visible=True)
        expect(shown).to_contain_text("reader:anna")
        expect(shown).to_contain_text("reading only")
        for path, heading in (
            *((name.lower().replace("-", ""), name) for name in PAGES),
            ("device/pi-3", "pi-3"),
        ):
            reader.go(path)
            expect(page.get_by_role("heading", name=heading, level=1)).to_be_visible()
            expect(page.get_by_role("status").filter(has_text="Reading")).to_have_count(0)
            found = {one.inner_text().strip() for one in page.get_by_role("button").all()}
            assert not found & ACTS, path
            assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], path
        assert page.evaluate(REVOKE) == 403
        assert reader.registry.device("pi-3").active
        reader.trouble.clear()  # the browser says that the answer was a 403
        refusals = wait_until(
            lambda: reader.registry.trail.entries(5, who="reader:anna", outcome="refused"),
            "the audit log does not have it",
        )
        assert "POST /dashboard/actions/devices/pi-3/revoke" in refusals[0].detail
        assert "reading alone" in refusals[0].detail
        reader.go("audit")
        expect(page.get_by_text("reading alone", exact=False).first).to_be_visible()
        page.get_by_role("button", name="Sign out").filter(visible=True).click()
        expect(page.get_by_text("You are not signed in")).to_be_visible()


def test_every_page_fits_a_phone(phone: Visit) -> None:
    page = phone.page
    for name in PAGES:
        page.get_by_role("link", name=name).click()
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        expect(page.get_by_role("status").filter(has_text="Reading")).to_have_count(0)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"], name
    phone.go("device/pi-1")
    expect(page.get_by_role("heading", name="pi-1")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_person_with_a_phone_signs_out_and_reads_how_to_come_back(phone: Visit) -> None:
    page = phone.page
    expect(page.locator(".person").filter(visible=True)).to_contain_text("anna")
    button = page.get_by_role("button", name="Sign out")
    expect(button).to_have_count(1)
    box = button.bounding_box()
    assert box is not None
    assert box["x"] + box["width"] <= PHONE["width"]
    button.click()
    expect(page.get_by_text("You are not signed in")).to_be_visible()
    expect(page.get_by_text("splitedge server dashboard-link")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_a_roll_out_under_way_is_watched_and_stopped_on_a_phone(
    chromium: Browser, tmp_path: Path, exported: Exported, run_server: Callable[..., ServerRun]
) -> None:
    state = tmp_path / "rolling"
    for version in (1, 2):
        exported.install(state / "models", version=version)
    run = run_server(state).wait_ready()
    with visit(chromium, run.http, state, PHONE) as phone:
        page, registry = phone.page, phone.registry
        for name in ("a-device-with-a-name-as-long-as-names-may-be", "pi-2"):
            enrol(registry, name, "default")
            registry.touch(name)
            registry.reports.note_running({name: "digits/2/d1"})
        health = "fallback<5%,agreement>0.97,exit>20%"
        registry.rollouts.start(RolloutPlan("digits", 1, health=health), 2)
        page.get_by_role("link", name="Roll-outs").click()
        expect(page.get_by_role("heading", name="digits/1")).to_be_visible()
        devices = page.get_by_role("table", name="Devices of roll-out", exact=False)
        expect(devices).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        for name in ("Pause", "Abort"):
            box = page.get_by_role("button", name=name, exact=True).bounding_box()
            assert box is not None
            assert 0 <= box["x"] < box["x"] + box["width"] <= PHONE["width"], name
        judged = page.get_by_text("of the share, 200 are needed", exact=False)
        expect(judged).to_be_visible()
        phone.act("Pause")
        expect(page.get_by_role("button", name="Resume", exact=True)).to_be_visible()
        expect(judged).to_have_count(0)  # nothing is judged while it is paused, nor after its end
        expect(page.get_by_text("fallback<5%, agreement>0.97, exit>20%")).to_be_visible()
        phone.act("Abort")
        expect(page.get_by_text("aborted", exact=True)).to_be_visible()
        expect(page.get_by_text("of the share ran it", exact=False)).to_be_visible()
        assert registry.rollouts.all()[0].state == "aborted"
        page.get_by_role("button", name="Start a roll-out").click()
        dialog = page.get_by_role("dialog").bounding_box()
        assert dialog is not None
        assert 0 <= dialog["x"] < dialog["x"] + dialog["width"] <= PHONE["width"]


def test_a_version_that_failed_says_so_and_a_way_back_names_its_end(
    chromium: Browser, tmp_path: Path, exported: Exported, run_server: Callable[..., ServerRun]
) -> None:
    state = tmp_path / "failing"
    exported.install(state / "models", version=1)
    options = "--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0", "--new-versions", "hold"
    run = run_server(state, options).wait_ready()
    exported.install(state / "models", version=2)
    with visit(chromium, run.http, state, DESK) as desk:
        page, registry = desk.page, desk.registry
        page.get_by_role("link", name="Models").click()
        expect(page.get_by_role("button", name="digits/2")).to_be_visible()
        expect(page.get_by_role("button", name="Roll back")).to_have_count(0)  # 1 is the first
        started = registry.rollouts.start(RolloutPlan("digits", 2), 1)
        failed = replace(started, state="failed", reason="two devices went back", ended_at=1.0)
        assert registry.rollouts.apply(started, failed)
        page.reload()
        expect(page.get_by_text("roll-out failed")).to_be_visible()
        page.get_by_role("button", name="Activate").click()
        dialog = page.get_by_role("dialog", name="Activate digits/2?")
        expect(dialog).to_contain_text("two devices went back")
        assert dialog.evaluate("it => getComputedStyle(it).textAlign") == "left"
        dialog.get_by_role("button", name="Activate", exact=True).click()
        page.get_by_role("button", name="Roll back").click()
        expect(page.get_by_role("dialog", name="Roll back to digits/1?")).to_be_visible()


def test_open_alerts_are_counted_beside_the_name_of_their_page(desk: Visit) -> None:
    count = desk.page.get_by_role("link", name="Alerts").locator(".count")
    # pi-3 has refused a bundle, which the server's next look finds
    expect(count).to_have_text(re.compile("[1-9]"), timeout=60_000)
    for alert in desk.registry.alerts.open():
        desk.registry.alerts.silence(alert.kind, alert.about, 3600.0)
    desk.page.reload()
    expect(desk.page.get_by_role("heading", name="Fleet")).to_be_visible()
    expect(count).to_have_count(0)


def test_an_empty_server_shows_the_command_that_enrols_a_device(
    chromium: Browser, tmp_path: Path, run_server: Callable[..., ServerRun]
) -> None:
    state = tmp_path / "an empty state"
    run = run_server(state).wait_ready()
    with visit(chromium, run.http, state, DESK, name=None) as desk:
        page = desk.page
        expect(page.get_by_text(f"splitedge server token create --state '{state}'")).to_be_visible()
        enrol = f"splitedge agent enroll --server {run.http} --state device --token"
        expect(page.get_by_text(f"{enrol} TOKEN")).to_be_visible()
        for name, word in (("Models", "--out '{}/models'"), ("Roll-outs", "--state '{}'")):
            page.get_by_role("link", name=name).click()
            expect(page.locator(".command").first).to_contain_text(word.format(state))
        page.get_by_role("link", name="Training").click()
        expect(page.locator(".command")).to_contain_text(f"--state '{state}'")
        page.get_by_role("link", name="Fleet").click()
        page.get_by_role("button", name="Make a token").click()
        expect(page.get_by_text(f"{enrol} TOKEN")).to_have_count(0)
        command = page.get_by_text("splitedge agent enroll", exact=False)
        expect(command).to_contain_text(f"--server {run.http} ")
        token = (command.text_content() or "").split()[-1]
        body = {"token": token, "name": "pi-9", "profile": load_reference("jetson-nano").to_dict()}
        answer = run.call("POST", "/api/v1/enroll", json=body)
        assert answer.status == 201, answer.data
        expect(page.get_by_role("link", name="pi-9")).to_be_visible()
        reading = Reading.from_heartbeat(SimulatedDevice("pi-9", "none/1/d1", 0, 0).heartbeat(60))
        desk.registry.telemetry.record({"pi-9": LastReading(time.time(), reading)})
        page.get_by_role("link", name="pi-9").click()
        expect(
            page.get_by_text("Latency of answers over time: nothing was measured")
        ).to_be_visible()
        # the link and the memory are told; answers there were none
        expect(page.locator(".chart.time canvas")).to_have_count(2)


def test_a_session_that_ended_leads_to_the_door(desk: Visit) -> None:
    signs: SignIns = desk.registry.sign_ins
    signs.end_all()
    expect(desk.page.get_by_text("You are not signed in", exact=False)).to_be_visible()
    # the browser says that one read was refused, and no more are tried
    assert len([text for text in desk.trouble if "401" in text]) == 1
    desk.trouble.clear()
