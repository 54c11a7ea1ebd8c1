"""Settings of a server in one frozen record, checked when it is built."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.providers.names import SETTINGS as PROVIDERS
from edge_sdk.settings import Traces
from edge_sdk.wire.address import Address, is_loopback
from edge_sdk.wire.broker_address import BrokerAddress, shown_broker
from edge_sdk.wire.clear_text import is_clear
from edge_sdk.wire.frames import MQTT_LIMITS
from profiles.checks import number, one_of, whole
from profiles.control_groups import usable_cores
from server.backend.senders import SenderLimits
from server.registry.location import RegistryLocation
from server.registry.telemetry.history import POINTS_MOST
from server.signing.keys import RootKeys

BrokerProgram = Literal["auto", "embedded", "mosquitto"]
Role = Literal["all", "api", "backend"]
AUTO: Final = "auto"
ENROLMENTS: Final = ("token", "approve")
NEW_VERSIONS: Final = ("all", "hold")
HTTP_DEFAULT: Final = "127.0.0.1:8000"
MQTT_PORT_DEFAULT: Final = 1883
# room for a reply of a thousand classes; a broker that takes less cannot be used
PACKET_BYTES_MIN: Final = 8_192


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings that an operator may choose.

    Attributes:
        state: folder of all that the server stores.
        http: address of the API.
        broker: address of a broker that the server starts, or the URL of your own broker.
        broker_program: the one that it starts: the embedded one, an installed Mosquitto, or with
            `auto` Mosquitto if it is installed and else the embedded one.
        mqtt_public: URL at which devices reach the broker, if it differs from `broker`.
        batch_max: most queries run at once.
        queue_max, queue_bytes: most queries waiting, and most bytes of their tensors; above either,
            a query is refused.
        limits: of what each device may send.
        threads: compute threads of onnxruntime; half the cores that the process may use are left to
            network and broker.
        provider: by which onnxruntime runs the segments; `auto` takes a GPU where one works.
        allocation: rule of the devices' depths, `budget` or `supersfl`.
        max_packet_bytes: longest payload of an MQTT message; longer ones go over HTTP.
        tls_cert, tls_key: PEM files for HTTPS and MQTTS.
        mqtt_ca: PEM file to verify your own broker with; by default the system's certificates.
        insecure: allow unencrypted connections from other machines.
        enrolment: "token" lets a device in that has a token; with "approve" it waits for the
            operator too.
        host_names: names by which requests may call the API besides its own, while it listens on
            loopback: those of a proxy in front of it. With one, requests for inference need a
            login as they do off loopback.
        audit_rows, audit_days: bounds of the audit log; the oldest entries are dropped.
        telemetry_points: most points of the devices' history; the oldest are dropped.
        registry: the database of the registry; by default as last time, else a file in `state`.
        root_keys: where the root keys of a new server are written, and how many.
        new_versions: "all" gives a new version of a model to all devices at once; with "hold" it
            waits for a roll-out.
        key_passphrase_file: file of the passphrase that encrypts the private keys.
        dashboard: whether there are pages for people at `/`.
        announce: type of service under which the API is announced on the local network; None
            announces nothing.
        traces: sends traces of queries to a collector; None makes none.
        artifacts: URL of a store: the API copies models and signed bundles there, and backends read
            them from there. None keeps them in `state` alone.
        role: "all" is the whole server in one process. The "api" leaves the queries over MQTT to
            backends, which share them; a "backend" answers queries, and nothing else.
    """

    state: Path
    http: Address
    broker: Address | BrokerAddress
    batch_max: int = 32
    mqtt_public: str | None = None
    queue_max: int = 256
    queue_bytes: int = 64_000_000
    limits: SenderLimits = SenderLimits()  # noqa: RUF009 - frozen
    threads: int = field(default_factory=lambda: max(1, usable_cores() // 2))
    provider: str = AUTO
    allocation: str = "budget"
    max_packet_bytes: int = MQTT_LIMITS.frame_bytes
    tls_cert: Path | None = None
    mqtt_ca: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    enrolment: str = "token"
    host_names: tuple[str, ...] = ()
    audit_rows: int = 100_000
    audit_days: float = 365.0
    telemetry_points: int = POINTS_MOST
    registry: RegistryLocation | None = None
    broker_program: BrokerProgram = "embedded"
    root_keys: RootKeys = RootKeys()  # noqa: RUF009 - frozen
    key_passphrase_file: Path | None = None
    dashboard: bool = True
    new_versions: str = "all"
    announce: str | None = None
    traces: Traces | None = None
    artifacts: str | None = None
    role: Role = "all"

    def __post_init__(self) -> None:
        check_fields(
            self,
            batch_max=whole(1),
            queue_max=whole(1),
            queue_bytes=whole(1),
            threads=whole(1),
            provider=one_of(PROVIDERS),
            max_packet_bytes=whole(PACKET_BYTES_MIN, MQTT_LIMITS.frame_bytes),
            allocation=one_of(("budget", "supersfl")),
            enrolment=one_of(ENROLMENTS),
            new_versions=one_of(NEW_VERSIONS),
            audit_rows=whole(100),
            audit_days=number(least=1),
            telemetry_points=whole(1_000),
            broker_program=one_of(get_args(BrokerProgram)),
            role=one_of(get_args(Role)),
        )
        self._refuse_unshared()
        if self.mqtt_public is not None:
            _check_public(self.mqtt_public)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigurationError("TLS needs both a certificate and its key")
        self._refuse_clear_public()
        self._refuse_clear_text()

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls_cert is not None

    @property
    def local(self) -> bool:
        """Whether this machine's programs alone reach the API: a proxy brings strangers."""
        return self.http.loopback and not self.host_names

    def _refuse_unshared(self) -> None:
        """Raises: ConfigurationError for a role and a broker that has no shared subscriptions."""
        if self.role == "all" or isinstance(self.broker, BrokerAddress):
            return
        if self.role == "backend":
            raise ConfigurationError(
                f"--mqtt {self.broker_program}: a backend joins a broker that runs; give its"
                " mqtt[s]://USER@HOST:PORT"
            )
        if self.broker_program != "mosquitto":
            raise ConfigurationError(
                f"--mqtt {self.broker_program}: the embedded broker has no shared subscriptions, by"
                " which backends share the queries; give --mqtt mosquitto (apt install mosquitto),"
                " or your Mosquitto's or EMQX's mqtt[s]://USER@HOST:PORT"
            )

    def _refuse_clear_public(self) -> None:
        """Raises: ConfigurationError for mqtt:// at the port where our own broker speaks TLS."""
        if self.mqtt_public is None or not self.tls or not isinstance(self.broker, Address):
            return
        told = BrokerAddress.parse(self.mqtt_public)
        here = told.host == self.broker.host or is_loopback(told.host)
        if here and told.port == self.broker.port and not told.tls:
            raise ConfigurationError(
                f"--mqtt-public {told.url}: the server's own broker speaks TLS there; give"
                f' mqtts{told.url.removeprefix("mqtt")}, or --mqtt-public "" to tell devices --mqtt'
            )

    def _refuse_clear_text(self) -> None:
        if self.insecure:
            return
        if isinstance(self.broker, BrokerAddress) and is_clear(self.broker.url):
            raise ConfigurationError(
                f"--mqtt {self.broker.url}: credentials would travel without encryption; use"
                " mqtts://, or --insecure to allow it"
            )
        if self.tls:
            if self.mqtt_public is not None and is_clear(self.mqtt_public):
                raise ConfigurationError(
                    f"--mqtt-public {self.mqtt_public}: devices would send their credentials there"
                    " without encryption; give mqtts://HOST:PORT, or --insecure to allow it"
                )
            return
        listening = [("--http", self.http)]
        if isinstance(self.broker, Address):
            listening.append(("--mqtt", self.broker))
        for option, address in listening:
            refuse_clear_text(option, address)


def check_certificate(certificate: Path, key: Path) -> None:
    """Check that TLS can use both files, before a server makes anything.

    Raises: ConfigurationError naming the option of the file that is wrong.
    """
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        try:
            text = path.read_text("ascii", "replace")
        except FileNotFoundError:
            raise ConfigurationError(f"{option} {path}: not found") from None
        except OSError as err:
            raise ConfigurationError(f"{option} {path}: cannot be read ({err.strerror})") from err
        if option == "--tls-cert" and ssl.PEM_HEADER not in text:
            raise ConfigurationError(f"{option} {path}: holds no PEM certificate")
    if "ENCRYPTED" in text:
        raise ConfigurationError(f"--tls-key {key}: needs a passphrase; give a key without one")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as err:
        raise ConfigurationError(
            f"--tls-key {key}: holds no key that fits --tls-cert {certificate}"
        ) from err


def refuse_clear_text(option: str, address: Address) -> None:
    """Refuse an address that other machines reach without encryption.

    Raises: ConfigurationError naming `option`.
    """
    if not address.loopback:
        raise ConfigurationError(
            f"{option} {address}: other machines would reach it without encryption; "
            "give --tls-cert and --tls-key, or --insecure to allow it"
        )


def parse_broker(text: str) -> tuple[BrokerProgram | None, Address | BrokerAddress | None]:
    """Read `auto`, `embedded` or `mosquitto`, each also with `:HOST:PORT`, or `mqtt[s]://HOST:PORT`.

    Returns: the program that the server starts, and the address, each None if none is named.
    Raises: ConfigurationError.
    """
    if "://" in text:
        return None, BrokerAddress.parse(text)
    for program in get_args(BrokerProgram):
        if text == program:
            return program, None
        if text.startswith(f"{program}:"):
            return program, Address.parse(text.removeprefix(f"{program}:"), "--mqtt")
    raise ConfigurationError(
        "--mqtt: expected auto, embedded or mosquitto, each also with :HOST:PORT, or"
        f" mqtt://HOST:PORT, got {shown_broker(text)}"
    )


def _check_public(url: str) -> None:
    """Raises: ConfigurationError for a URL that devices cannot be told."""
    address = BrokerAddress.parse(url)
    if address.username is not None or address.password is not None:
        raise ConfigurationError("--mqtt-public: all devices are told this; leave the login out")
