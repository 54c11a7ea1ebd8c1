"""Rules of who may use a route: a device, the operator, a key of a scope, or everyone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from server.errors import ForbiddenError
from server.registry.records import ApiKey, Device, Scope
from server.registry.transactions import OPERATOR


@dataclass(frozen=True, slots=True)
class Login:
    """Sender of a request; the operator if it is neither a device nor a key.

    Attributes:
        models: the models that it may ask; None for all.
    """

    device: Device | None = None
    key: ApiKey | None = None
    models: frozenset[str] | None = None

    @property
    def name(self) -> str:
        """Name in the audit log and in the accounts of senders; no device has one with a colon."""
        if self.device is not None:
            return self.device.id
        return OPERATOR if self.key is None else f"key:{self.key.name}"

    def has(self, scope: Scope) -> bool:
        """Whether it may do what a scope opens; the operator may do all, a device nothing."""
        return self.device is None and (self.key is None or scope in self.key.scopes)

    def check_model(self, name: str) -> None:
        """Check that it may ask a model.

        Raises: ForbiddenError.
        """
        if self.models is not None and name not in self.models:
            may = ", ".join(sorted(self.models)) or "none now"
            raise ForbiddenError(f"this key may ask the models {may}; not {name[:63]!r}")


@dataclass(frozen=True, slots=True)
class Rule:
    """Senders that may use a route.

    Attributes:
        operator: whether the operator may. scopes: the keys that may, by any of these.
        devices: which devices may: `itself` is the one that the path names.
        waiting: whether a device that waits for approval counts.
        without_login: where no login is asked for: `loopback` on a server that listens there.
    """

    operator: bool = True
    scopes: tuple[Scope, ...] = ()
    devices: Literal["none", "itself", "all"] = "none"
    waiting: bool = False
    without_login: Literal["never", "loopback", "always"] = "never"

    def is_open(self, *, loopback: bool) -> bool:
        """Whether the route asks for no login, on a server that listens on loopback or beyond."""
        return self.without_login == "always" or (loopback and self.without_login == "loopback")

    def check(self, login: Login, device_id: str | None = None) -> None:
        """Check a login.

        Args:
            device_id: the device that the path names, if it names one.
        Raises: ForbiddenError saying who may.
        """
        if login.device is not None:
            if self.devices == "none":
                raise ForbiddenError(f"only {self._who()} may do this, a device may not")
            if self.devices == "itself" and login.device.id != device_id:
                raise ForbiddenError("a device may ask about itself only")
        elif login.key is not None:
            if not set(self.scopes) & set(login.key.scopes):
                raise ForbiddenError(
                    f"only {self._who()} may do this, the key {login.key.name} has"
                    f" {', '.join(login.key.scopes)}"
                )
        elif not self.operator:
            raise ForbiddenError("only the device itself may do this; the operator is not a device")

    def _who(self) -> str:
        keys = [f"a key of scope {' or '.join(self.scopes)}"] if self.scopes else []
        operator = ["the operator (its secret is in keys/operator.key)"] if self.operator else []
        devices = {"none": [], "itself": ["the device itself"], "all": ["a device"]}[self.devices]
        return " or ".join([*operator, *keys, *devices])


# health, and what carries a token of its own
PUBLIC: Final = Rule(without_login="always")
# inference and what clients of v2 ask before it
INFER: Final = Rule(scopes=("infer",), devices="all", without_login="loopback")
# what describes the server: it tells a stranger what there is to attack
DESCRIBE: Final = Rule(scopes=("operate",), without_login="loopback")
OPERATE: Final = Rule(scopes=("operate",))
# what `splitedge train` asks the server for
OPERATE_OR_TRAIN: Final = Rule(scopes=("operate", "train"))
ITSELF: Final = Rule(operator=False, devices="itself")
ITSELF_WAITING: Final = Rule(operator=False, devices="itself", waiting=True)
ITSELF_OR_OPERATE: Final = Rule(scopes=("operate", "train"), devices="itself")
DEVICES: Final = Rule(scopes=("operate",), devices="all")
