"""The file of API keys: tenants with their limits, and the hashes of their keys.

    {"tenants": {"acme": {"models": ["demo"], "requests_per_minute": 60}},
     "keys": [{"id": "3f9a0c12", "sha256": "...", "tenant": "acme", "scopes": ["infer"]}]}

A key has 256 random bits, so one round of SHA-256 protects it: they cannot be guessed. Slow hashes
(bcrypt, scrypt) are for passwords that people choose, and would cost time with every request. Owns
the format and its check, and which keys are in force; knows no request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from ...cluster.watched_files import WatchedFiles
from ...core.errors import StartupFailed
from .caller import Caller, Limits

log = logging.getLogger(__name__)

_T = TypeVar("_T")

KEY_PREFIX = "bk-"
MAX_FILE_BYTES = 4 << 20

_KEY_BYTES = 32
_CALLER_ID_BYTES = 8
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """The SHA-256 of a key, and its holder."""

    digest: bytes
    caller: Caller


Count = Annotated[int, Meta(ge=1)]


class _Tenant(Struct, forbid_unknown_fields=True):
    models: list[str] | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent_requests: Count | None = None


class _Key(Struct, forbid_unknown_fields=True):
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    tenant: str
    scopes: list[Literal["infer", "metrics", "admin"]]
    id: Any = None  # for people: the first digits of the hash


class _File(Struct, forbid_unknown_fields=True):
    tenants: dict[str, Raw]
    keys: list[Raw]


class BadKeyFile(Exception):
    """The file is invalid; the text has the place."""


def digest_of(key: str) -> bytes:
    """The hash of a key that the file has."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def caller_id_of(key_digest: bytes) -> int:
    """The `Caller.caller_id` of a key's holder: the same at all gateways."""
    digest = hashlib.blake2b(key_digest, digest_size=_CALLER_ID_BYTES).digest()
    return int.from_bytes(digest, "little")


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in the file; raises BadKeyFile, also if users other than its owner may write to
    it."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise BadKeyFile("others than its owner may write to it")
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BadKeyFile(error.strerror or "it cannot be read") from error
    if len(raw) > MAX_FILE_BYTES:
        raise BadKeyFile(f"longer than {MAX_FILE_BYTES >> 20} MiB")
    return parse_keys(raw)


def parse_keys(raw: bytes) -> tuple[ApiKey, ...]:
    """The keys in the file's bytes; raises BadKeyFile."""
    file = _decode(raw, _File, "the file")
    tenants = {name: _tenant(name, entry) for name, entry in file.tenants.items()}
    return tuple(_key(entry, tenants, f"keys[{i}]") for i, entry in enumerate(file.keys))


def add_key(
    path: Path,
    tenant: str,
    scopes: frozenset[str],
    *,
    models: frozenset[str] | None = None,
    limits: Mapping[str, int] | None = None,
) -> str:
    """Draw a key, write its hash, and return the key, which is stored nowhere.

    `models` and `limits` are the tenant's, and replace only those given. Raises StartupFailed.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    digest = digest_of(key).hex()
    entry = {"id": digest[:8], "sha256": digest, "tenant": tenant, "scopes": sorted(scopes)}
    try:
        with _locked(path):
            document: dict[str, Any] = {"tenants": {}, "keys": []}
            if path.exists():
                load_keys(path)
                document = json.loads(path.read_bytes())
            settings = document["tenants"].setdefault(tenant, {})
            settings.update(limits or {})
            if models is not None:
                settings["models"] = sorted(models)
            document["keys"].append(entry)
            raw = json.dumps(document, indent=2).encode() + b"\n"
            parse_keys(raw)  # never write what a gateway would refuse
            _replace(path, raw)
    except (BadKeyFile, OSError) as error:
        raise StartupFailed(f"cannot add a key to {path}: {error}") from error
    return key


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclude other writers, by a lock on the folder, as the file itself is replaced."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, raw: bytes) -> None:
    """Replace the file atomically: readers see the old or the new one. A new file has mode 0600."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:  # a Ctrl-C too: the half-written file is of no use
        os.unlink(name)
        raise


def _decode(raw: bytes | Raw, kind: type[_T], where: str) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadKeyFile(f"{where}: {error}") from error


def _tenant(name: str, entry: Raw) -> Caller:
    """The caller of a tenant's keys, without the scopes and id of a key."""
    where = f"tenant {name!r:.80}"
    if not _TENANT.match(name):
        raise BadKeyFile(f"{where}: a name is 1 to 64 of A-Z a-z 0-9 _ . -")
    found = _decode(entry, _Tenant, where)
    limits = Limits(*(getattr(found, field.name) for field in fields(Limits)))
    models = None if found.models is None else frozenset(found.models)
    return Caller(name, frozenset(), models=models, limits=limits)


def _key(entry: Raw, tenants: Mapping[str, Caller], where: str) -> ApiKey:
    found = _decode(entry, _Key, where)
    if (tenant := tenants.get(found.tenant)) is None:
        raise BadKeyFile(f"{where}: its tenant is not in tenants")
    digest, scopes = bytes.fromhex(found.sha256), frozenset(found.scopes)
    return ApiKey(digest, replace(tenant, scopes=scopes, caller_id=caller_id_of(digest)))


class KeyRing:
    """The keys in force: of a file that is read again when it has changed. If it is invalid then,
    it is logged and the last keys stay in force; at start it raises StartupFailed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files = WatchedFiles((path,))
        self._files.have_changed()
        try:
            self._keys = load_keys(path)
        except BadKeyFile as error:
            raise StartupFailed(
                f"--api-keys {path}: {error}", hint="make one: baton keys add --tenant T FILE"
            ) from error

    def current(self) -> tuple[ApiKey, ...]:
        """The keys that are in force now."""
        if self._files.have_changed():
            try:
                self._keys = load_keys(self._path)
                log.info("API keys were reloaded: %d", len(self._keys))
            except BadKeyFile as error:
                log.error("--api-keys %s: %s; the previous keys stay in use", self._path, error)
                if isinstance(error.__cause__, OSError):  # the file may be right as it is
                    self._files.forget()
        return self._keys
