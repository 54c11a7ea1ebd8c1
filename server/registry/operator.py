"""The operator's key: a secret in a file, `{state}/keys/operator.key`, readable by its owner only.

A user who can read that file may manage devices and tokens over HTTP.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Final

from edge_sdk.durable import make_folder, sync_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from server.registry.credentials import new_secret

OPERATOR_KEY: Final = Path("keys/operator.key")

_MIN_CHARACTERS: Final = 32


def load_operator_secret(state: Path) -> str:
    """The operator's secret of the server with this state folder.

    Raises: ConfigurationError if it is missing, too short, or readable by other users.
    """
    path = state / OPERATOR_KEY
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(1024).decode("ascii").strip()
    except FileNotFoundError as err:
        raise ConfigurationError(f"{path}: not found; start the server once to make it") from err
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigurationError(f"{path}: cannot be read: {err}") from err
    if mode & 0o077:
        raise ConfigurationError(
            f"{path}: expected a file for its owner only, got mode {mode & 0o777:o}; others may "
            "know it: delete it and restart the server for a new one"
        )
    if len(secret) < _MIN_CHARACTERS:
        raise ConfigurationError(
            f"{path}: expected at least {_MIN_CHARACTERS} characters, got {len(secret)}; delete it "
            "and restart the server for a new one"
        )
    return secret


def load_or_create_operator_secret(state: Path) -> str:
    """The secret, made at the first call; two calls at once get the same one.

    Raises: ConfigurationError as `load_operator_secret`; StorageError.
    """
    path = state / OPERATOR_KEY
    if not path.exists():
        make_folder(path.parent, mode=0o700)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        write_atomic(draft, f"{new_secret()}\n".encode(), mode=0o600)
        with contextlib.suppress(FileExistsError):  # another call was first
            path.hardlink_to(draft)
        draft.unlink()
        sync_folder(path.parent)
    return load_operator_secret(state)
