"""Units for systemd: their text, and their installation into the system of an image."""

from __future__ import annotations

import configparser
import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edge_sdk.errors import ConfigurationError, StorageError
from edge_sdk.systemd import install as install_module
from edge_sdk.systemd.unit import ServiceUnit
from tests.reader import environment

pytestmark = pytest.mark.deadline

OPTIONS = ("--sink", 'jsonl:/srv/answers/the "new"', "--serve", "127.0.0.1:8080")
# systemd's own measure, 0 to 10; at most "OK" is asked for, which ends at 5
EXPOSURE_MAX = 2.0


def splitedge(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "edge_sdk.cli", *words],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )


def unit_of(kind: str, *words: str) -> str:
    done = splitedge(kind, "install-service", "--dry-run", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def read(unit: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names have capitals
    parser.read_string(unit)
    return parser


@pytest.mark.parametrize("kind", ["agent", "server"])
def test_systemd_takes_the_unit_and_finds_it_little_exposed(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"splitedge-{kind}.service"
    path.write_text(unit_of(kind))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    level = re.search(r"exposure level for \S+: ([\d.]+)", judged)
    assert level is not None
    assert float(level[1]) <= EXPOSURE_MAX
    service = read(path.read_text())["Service"]
    assert service["Type"] == "notify"
    assert int(service["WatchdogSec"]) >= 60
    assert service["MemoryMax"].endswith("%")
    assert service["User"] == f"splitedge-{kind}"


def test_a_server_below_port_1024_may_listen_there_and_others_may_not() -> None:
    assert read(unit_of("server"))["Service"]["CapabilityBoundingSet"] == ""
    web = read(unit_of("server", "--", "--http", "0.0.0.0:443"))["Service"]
    assert web["AmbientCapabilities"] == web["CapabilityBoundingSet"] == "CAP_NET_BIND_SERVICE"


def test_a_port_below_1024_in_the_settings_counts_unless_an_option_has_another(
    tmp_path: Path,
) -> None:
    settings = tmp_path / "etc" / "splitedge" / "agent.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('[serve]\naddress = "127.0.0.1:443"\n')

    def bounding(*words: str) -> str:
        unit = unit_of("agent", "--root", str(tmp_path), *words)
        return read(unit)["Service"]["CapabilityBoundingSet"]

    assert bounding() == "CAP_NET_BIND_SERVICE"
    assert bounding("--", "--serve", "127.0.0.1:8080") == ""
    taken = tmp_path / "pi"
    taken.mkdir()
    (taken / "agent.toml").write_text('[serve]\naddress = "127.0.0.1:8080"\n')
    assert bounding("--take", str(taken)) == ""


def test_what_cannot_work_is_refused_before_anything_is_changed() -> None:
    for words, why in (
        (("--", "--serv", "1"), "No such option: --serv"),
        (("--", "--state", "x"), "--take DIR moves yours there"),
        (("--", "--source", "-"), "a service has no standard input"),
        (("--", "--source=-"), "give a source that does not end"),
        (("--memory-max", "12"), "expected bytes such as 512M"),
        (("--user", "Me"), "expected a name such as splitedge-agent"),
    ):
        done = splitedge("agent", "install-service", "--dry-run", *words)
        assert done.returncode != 0
        assert why in " ".join(done.stderr.split()), done.stderr


def test_a_log_as_json_is_asked_for_by_a_variable() -> None:
    done = splitedge("agent", "install-service", "--dry-run", "--", "--log", "json")
    assert "put SPLITEDGE_LOG=json into /etc/splitedge/agent.env" in " ".join(done.stderr.split())
    debug = splitedge("agent", "install-service", "--dry-run", "--", "--debug")
    assert "No such option: --debug" in debug.stderr


def test_words_with_spaces_and_signs_reach_the_service_as_they_are() -> None:
    unit = ServiceUnit("agent", ["/opt/my apps/100%/splitedge"], "u", "1G", 60, "about")
    assert 'ExecStart="/opt/my apps/100%%/splitedge" agent run' in unit.text()
    (line,) = [each for each in unit.options(OPTIONS).splitlines() if each[0] != "#"]
    # a double-quoted value of a shell has the same rules
    shell = f"{line}; eval \"printf '%s\\n' $SPLITEDGE_AGENT_OPTIONS\""
    typed = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert tuple(typed.stdout.splitlines()) == OPTIONS
    with pytest.raises(ConfigurationError, match="expected a name"):
        ServiceUnit("agent", ["x"], "a b", "1G", 60, "about")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """The root of a system that does not run, with a splitedge in it."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tmp_path / "etc" / "group").write_text("root:x:0:\n")
    program = tmp_path / "opt" / "splitedge" / "bin" / "splitedge"
    program.parent.mkdir(parents=True)
    program.touch()
    return tmp_path


def install(image: Path, *words: str, kind: str = "agent") -> subprocess.CompletedProcess[str]:
    command = ("--root", str(image), "--command", "/opt/splitedge/bin/splitedge")
    return splitedge(kind, "install-service", *command, *words)


def owner(image: Path, path: Path) -> str:
    uid = str(path.lstat().st_uid)
    lines = (image / "etc" / "passwd").read_text().splitlines()
    return next(line.split(":")[0] for line in lines if line.split(":")[2] == uid)


def test_a_service_is_installed_changed_and_removed_and_its_state_stays(image: Path) -> None:
    first = install(image, "--", *OPTIONS)
    if os.geteuid() != 0:  # it makes users, so nobody else gets far
        assert "run it as root: sudo splitedge agent install-service" in first.stderr
        return
    assert first.returncode == 0, first.stderr
    assert "next, enrol the device: sudo -u splitedge-agent splitedge agent enroll" in first.stdout
    units = image / "etc" / "systemd" / "system"
    unit = units / "splitedge-agent.service"
    assert unit.read_text() == unit_of("agent", "--command", "/opt/splitedge/bin/splitedge")
    assert (units / "multi-user.target.wants" / unit.name).is_symlink()
    assert "dialout:" in (image / "etc" / "group").read_text()
    state = image / "var" / "lib" / "splitedge" / "agent"
    assert owner(image, state) == "splitedge-agent"
    assert state.stat().st_mode & 0o777 == 0o700
    settings = image / "etc" / "splitedge" / "agent.toml"
    assert (state / "agent.toml").readlink() == Path("/etc/splitedge/agent.toml")
    assert "deadline_s" in settings.read_text()
    assert settings.stat().st_mode & 0o777 == 0o640

    options = image / "etc" / "splitedge" / "agent.env"
    written = options.read_text()
    settings.write_text("[agent]\ndeadline_s = 0.5\n")
    (state / "outbox.sqlite").write_text("a late answer")
    again = install(image, "--memory-max", "300M")
    assert again.returncode == 0, again.stderr
    assert options.read_text() == written
    assert settings.read_text() == "[agent]\ndeadline_s = 0.5\n"
    assert read(unit.read_text())["Service"]["MemoryMax"] == "300M"

    removed = splitedge("agent", "uninstall-service", "--root", str(image))
    assert removed.returncode == 0, removed.stderr
    assert str(state) in removed.stdout
    assert not any(units.rglob("splitedge*"))
    assert (state / "outbox.sqlite").exists()
    twice = splitedge("agent", "uninstall-service", "--root", str(image))
    assert "is not installed" in twice.stderr
    purged = splitedge("agent", "uninstall-service", "--purge", "--root", str(image))
    assert purged.returncode == 0, purged.stderr
    assert not state.exists()
    assert not settings.exists()


def test_an_enrolled_device_is_moved_and_never_over_another(image: Path, tmp_path: Path) -> None:
    pi = tmp_path / "pi"
    pi.mkdir()
    refused = install(image, "--take", str(pi))
    if os.geteuid() != 0:
        assert "run it as root" in refused.stderr
        return
    assert "not the state folder of an enrolled device" in refused.stderr
    (pi / "agent.json").write_text("{}")
    (pi / "agent.toml").write_text("[agent]\ndeadline_s = 2\n")
    link = tmp_path / "link"
    link.symlink_to("pi")
    by_link = install(image, "--take", str(link))
    assert f"is a link; give --take {pi}" in by_link.stderr  # the link would move, not the state
    taken = install(image, "--take", str(pi))
    assert taken.returncode == 0, taken.stderr
    assert "next, enrol" not in taken.stdout
    assert not pi.exists()
    state = image / "var" / "lib" / "splitedge" / "agent"
    assert owner(image, state / "agent.json") == "splitedge-agent"
    assert "deadline_s = 2" in (image / "etc" / "splitedge" / "agent.toml").read_text()

    pi.mkdir()
    (pi / "agent.json").write_text("{}")
    second = install(image, "--take", str(pi))
    assert "has a state already, which is never overwritten" in second.stderr
    assert (pi / "agent.json").exists()


def socket_at(path: Path) -> None:
    """What an agent that was killed leaves."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_folder_is_moved_whole_although_its_agent_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    pi, target = tmp_path / "pi", tmp_path / "agent"
    (pi / "slots").mkdir(parents=True)
    (pi / "agent.json").write_text("{}")
    (pi / "agent.json").chmod(0o600)
    (pi / "slots" / "a").write_bytes(b"a")
    (pi / "agent.toml").symlink_to("/etc/splitedge/agent.toml")
    socket_at(pi / "agent.sock")
    if elsewhere:
        monkeypatch.setattr(Path, "rename", on_another_disk)
    install_module._move(pi, target)
    assert not pi.exists()
    assert sorted(path.name for path in target.rglob("*")) == [
        "a",
        "agent.json",
        "agent.toml",
        "slots",
    ]
    assert (target / "agent.json").stat().st_mode & 0o777 == 0o600
    assert (target / "agent.toml").readlink() == Path("/etc/splitedge/agent.toml")


def on_another_disk(self: Path, target: Path) -> Path:
    """As the system answers where the two are on different file systems."""
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(self), None, str(target))


@pytest.mark.parametrize("fault", ["a pipe, which cannot be copied", "a disk that fails"])
def test_a_folder_that_cannot_be_copied_stays_where_it_was(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk may say only when it is waited for that it did not take the copy."""
    pi, target = tmp_path / "pi", tmp_path / "agent"
    pi.mkdir()
    (pi / "agent.json").write_text("{}")

    def failing(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "rename", on_another_disk)
    if fault == "a disk that fails":
        monkeypatch.setattr(os, "fsync", failing)
    else:
        os.mkfifo(pi / "pipe")
    with pytest.raises(StorageError, match=r"--take .*pi: not copied to .*agent.*was not moved"):
        install_module._move(pi, target)
    assert not target.exists()
    assert (pi / "agent.json").read_text() == "{}"


SYSTEMCTL = """#!/bin/sh
echo "$*" >> {log}
case "$1" in
    is-active) echo active ;;
    {failing}) echo "no such luck" >&2; exit 1 ;;
esac
"""


def running_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> tuple[install_module.Installer, Path]:
    """The installer of a service that runs, as a systemctl says that fails at one command."""
    log, tool = tmp_path / "log", tmp_path / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(SYSTEMCTL.format(log=log, failing=failing))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    unit = ServiceUnit("agent", ["/usr/bin/splitedge"], "u", "1G", 60, "about")
    installer = install_module.Installer(unit, tmp_path)
    (tmp_path / unit.unit_path.lstrip("/")).parent.mkdir(parents=True)
    (tmp_path / unit.unit_path.lstrip("/")).write_text(unit.text())
    installer._here = True
    return installer, log


def test_a_service_that_ran_is_started_again_where_the_installation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer, log = running_service(tmp_path, monkeypatch, "never")
    with pytest.raises(ConfigurationError, match=r"^the disk is full$"), installer._stopped():
        raise ConfigurationError("the disk is full")
    assert [line.split()[0] for line in log.read_text().splitlines()] == [
        "is-active",
        "stop",
        "start",
    ]
    assert not installer.stopped
    with installer._stopped():
        pass
    assert installer.stopped


def test_the_first_fault_is_told_although_the_service_does_not_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer, _ = running_service(tmp_path, monkeypatch, "start")
    told = (
        r"^the disk is full; splitedge-agent\S*, which was stopped for this, does not start again"
    )
    with pytest.raises(ConfigurationError, match=told), installer._stopped():
        raise ConfigurationError("the disk is full")


def test_a_program_that_leads_into_a_home_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    shutil.copy("/bin/true", home / "python")
    monkeypatch.setattr(install_module, "HIDDEN", (f"{home}/",))
    link, script, plain = tmp_path / "link", tmp_path / "script", tmp_path / "plain"
    link.symlink_to(home / "python")
    script.write_text(f"#!{link} -P\nprint()\n")
    shutil.copy("/bin/true", plain)

    def check(program: Path) -> None:
        unit = ServiceUnit("agent", [str(program)], "u", "1G", 60, "about")
        install_module.Installer(unit, Path("/"))._check_command()

    for program in (link, script):
        with pytest.raises(ConfigurationError, match="which the service cannot read"):
            check(program)
    check(plain)


def test_a_device_whose_settings_are_not_those_in_etc_stays_where_it_is(
    image: Path, tmp_path: Path
) -> None:
    pi, place = tmp_path / "pi", image / "etc/splitedge/agent.toml"
    pi.mkdir(mode=0o700)
    (pi / "agent.json").write_text("{}")
    (pi / "agent.toml").write_text("[agent]\n")
    place.parent.mkdir(parents=True)
    place.write_text("[serve]\n")
    refused = install(image, "--take", str(pi))
    assert refused.returncode == 1
    if os.geteuid() != 0:
        assert "run it as root" in refused.stderr
        return
    assert "hold different settings" in refused.stderr
    assert (pi / "agent.json").exists()
    place.unlink()
    assert install(image, "--take", str(pi)).returncode == 0


def test_a_second_installation_keeps_what_it_is_not_told(image: Path) -> None:
    (image / "srv" / "answers").mkdir(parents=True)
    for kind, option in (("server", "--http"), ("agent", "--serve")):
        given = ("--user", "keeper", "--memory-max", "300M", "--write", "/srv/answers")
        first = install(image, *given, "--", option, "127.0.0.1:443", kind=kind)
        if os.geteuid() != 0:
            assert "run it as root" in first.stderr
            return
        assert first.returncode == 0, first.stderr
        unit = image / "etc" / "systemd" / "system" / f"splitedge-{kind}.service"
        written = unit.read_text()
        service = read(written)["Service"]
        assert service["AmbientCapabilities"] == "CAP_NET_BIND_SERVICE"
        assert (service["User"], service["MemoryMax"]) == ("keeper", "300M")
        assert service["ReadWritePaths"] == "/srv/answers"
        again = splitedge(kind, "install-service", "--root", str(image))
        assert again.returncode == 0, again.stderr
        assert unit.read_text() == written
        dry = splitedge(kind, "install-service", "--dry-run", "--root", str(image))
        assert dry.stdout == written
        other = install(image, "--", option, "127.0.0.1:8443", kind=kind)
        assert other.returncode == 0, other.stderr
        assert "CAP_NET_BIND_SERVICE" not in unit.read_text()


def test_new_options_leave_the_operators_lines_and_others_cannot_read_them(image: Path) -> None:
    if install(image, "--", "--serve", "127.0.0.1:1").returncode != 0:
        assert os.geteuid() != 0
        return
    options = image / "etc" / "splitedge" / "agent.env"
    options.write_text(f"# mine\nHTTPS_PROXY=http://proxy:3128\n{options.read_text()}MINE=2\n")
    before = options.read_text()
    options.chmod(0o644)  # as an editor may leave it
    kept = install(image)
    assert kept.returncode == 0, kept.stderr
    assert options.stat().st_mode & 0o777 == 0o600
    assert options.read_text() == before
    options.chmod(0o644)
    done = install(image, "--", "--serve", "127.0.0.1:8080")
    assert done.returncode == 0, done.stderr
    assert options.read_text() == before.replace("127.0.0.1:1", "127.0.0.1:8080")
    assert options.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "line",
    [
        "SPLITEDGE_AGENT_OPTIONS=--serve 127.0.0.1:80",
        "SPLITEDGE_AGENT_OPTIONS='--serve 127.0.0.1:80'",
        'SPLITEDGE_AGENT_OPTIONS="--serve \\\n127.0.0.1:80"',
        'OTHER="a\nb"\n SPLITEDGE_AGENT_OPTIONS = "--serve 127.0.0.1:80"',
    ],
)
def test_options_that_an_operator_wrote_are_read_and_replaced(line: str) -> None:
    unit = ServiceUnit("agent", ["x"], "u", "1G", 60, "about")
    text = f"{line}\nLAST=1"
    assert unit.options_in(text) == ["--serve", "127.0.0.1:80"]
    new = unit.options(["--local"], text)
    assert unit.options_in(new) == ["--local"]
    assert new.endswith("\nLAST=1")
    assert "serve" not in new
    with pytest.raises(ConfigurationError, match="give the options behind two dashes"):
        unit.options_in('SPLITEDGE_AGENT_OPTIONS="--serve')


def test_root_follows_no_link_out_of_the_service_users_folder(image: Path, tmp_path: Path) -> None:
    secret = tmp_path / "root" / "secret"
    secret.parent.mkdir()
    secret.write_text("of root")
    before = secret.stat()
    if install(image).returncode != 0:
        assert os.geteuid() != 0
        return
    state = image / "var" / "lib" / "splitedge" / "agent"
    settings = image / "etc" / "splitedge" / "agent.toml"
    written = settings.read_text()
    for put in (os.symlink, os.link):
        (state / "agent.toml").unlink()
        put(secret, state / "agent.toml")
        (state / "inner").unlink(missing_ok=True)
        (state / "inner").symlink_to(secret.parent)
        install(image, "--user", "other" if put is os.symlink else "third")
        assert settings.read_text() == written
        assert (secret.stat().st_uid, secret.stat().st_mode) == (before.st_uid, before.st_mode)
        assert secret.parent.stat().st_uid == before.st_uid
    assert owner(image, state) == "other"  # the second name of a file is refused
    (state / "agent.toml").unlink()
    assert install(image, "--user", "third").returncode == 0
    assert owner(image, state) == owner(image, state / "inner") == "third"


def test_a_folder_that_changes_while_it_is_given_away_stays_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside, state = tmp_path / "outside", tmp_path / "state"
    for folder in (outside, state / "inner"):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    given: list[tuple[int, int]] = []

    def chown(name: str, *_: int, dir_fd: int, follow_symlinks: bool) -> None:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        given.append((found.st_dev, found.st_ino))
        if name == "inner":  # the service's user is faster than root
            (state / "inner").rename(state / "gone")
            (state / "inner").symlink_to(outside)

    monkeypatch.setattr(os, "chown", chown)
    monkeypatch.setattr(os, "fchown", lambda *_: None)
    install_module._give(state, 1, 1)
    found = (outside / "file").stat()
    assert given
    assert (found.st_dev, found.st_ino) not in given


def test_the_services_user_reaches_its_folders_whatever_roots_umask(image: Path) -> None:
    before = os.umask(0o077)
    try:
        done = install(image)
    finally:
        os.umask(before)
    if os.geteuid() != 0:
        assert "run it as root" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    for folder in ("var/lib", "var/lib/splitedge", "etc/splitedge"):
        assert (image / folder).stat().st_mode & 0o777 == 0o755, folder
    assert (image / "var/lib/splitedge/agent").stat().st_mode & 0o777 == 0o700


def test_folders_to_write_into_are_checked(image: Path) -> None:
    for folder, why in (
        ("/srv/kept", "no such folder; make it first"),
        ("kept", "expected a whole path such as /srv/answers"),
        ("/home/pi/kept", "which the service cannot see"),
    ):
        done = install(image, "--write", folder)
        if os.geteuid() != 0:
            continue
        assert why in " ".join(done.stderr.split())


def test_a_machine_without_systemd_and_a_program_at_home_are_refused(image: Path) -> None:
    home = image / "home" / "pi" / "splitedge"
    home.parent.mkdir(parents=True)
    shutil.copy("/bin/true", home)
    hidden = splitedge(
        "agent", "install-service", "--root", str(image), "--command", "/home/pi/splitedge"
    )
    if os.geteuid() != 0:
        assert "run it as root" in hidden.stderr
        return
    said = " ".join(hidden.stderr.split())
    assert "for all users (docs/services.md): sudo PIPX_HOME=/opt/pipx" in said
    assert "pipx install './splitedge-VERSION-py3-none-any.whl[serve]'" in said
    assert not (image / "etc" / "systemd").exists()
    if not Path("/run/systemd/system").is_dir():
        here = splitedge("agent", "install-service")
        assert "systemd does not run this machine" in here.stderr
