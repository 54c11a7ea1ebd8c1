"""Settings of a training with real devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.bundles.personal_weights import NAME
from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.address import Address
from server.settings import refuse_clear_text
from server.training.fleet.mailbox import SILENCE_S


@dataclass(frozen=True, slots=True)
class TrainerSettings:
    """Settings of one training with real devices.

    Attributes:
        state: the server's state folder; its registry says which devices may take part.
        name: of the training, of its folder and of the weights that devices keep. Devices refuse
            one that is no plain file name.
        http: address at which devices reach the trainer.
        min_devices: devices that must have joined before the first round; the recipe's
            `data.clients` where None.
        join_s: seconds to wait for them, and later for devices that a quorum lacks.
        silence_s: seconds without a heartbeat after which a device counts as away.
        resume: continue after the last saved round.
        force: replace a finished training of that name.
        server: URL of the running server, which invites the devices; None invites none.
        tls_cert, tls_key: PEM files, the server's own.
        insecure: listen without TLS on an address other than loopback.
        host_names: names by which requests may call a trainer on loopback besides its own: those
            of a proxy in front of it. With one, /metrics needs a login as it does off loopback.
    """

    state: Path
    name: str
    http: Address
    min_devices: int | None = None
    join_s: float = 600.0
    silence_s: float = SILENCE_S
    resume: bool = False
    force: bool = False
    server: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    host_names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"training {self.name!r:.100}: expected letters, digits, '.', '_' and '-', 100 at"
                " most and a letter or digit first, since devices name files so; give the recipe's"
                " file another name"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigurationError("TLS needs both a certificate and its key")
        if self.tls_cert is None and not self.insecure:
            refuse_clear_text("--http", self.http)
        if self.min_devices is not None and self.min_devices < 1:
            raise ConfigurationError(f"--min-devices: expected 1 or more, got {self.min_devices}")
        if not 1 <= self.silence_s < math.inf:
            raise ConfigurationError(f"--silence: expected 1 s or more, got {self.silence_s}")

    @property
    def local(self) -> bool:
        """Whether this machine's programs alone reach the trainer: a proxy brings strangers."""
        return self.http.loopback and not self.host_names

    @property
    def folder(self) -> Path:
        """Folder of all files that the training writes."""
        return self.state / "training" / self.name
