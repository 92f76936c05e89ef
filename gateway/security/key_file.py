"""The file of API keys: tenants with their limits, and the hashes of their keys.

    {"tenants": {"acme": {"models": ["demo"], "requests_per_minute": 60}},
     "keys": [{"id": "3f9a0c12", "sha256": "...", "tenant": "acme", "scopes": ["infer"]}]}

A key is 256 random bits, so one round of SHA-256 protects it: nobody can guess through that many,
and slow hashes (bcrypt, scrypt) exist for passwords that people choose. They would only make each
request pay. Owns the format and its check; knows no request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...core.errors import StartupFailed
from ..request.caller import SCOPES, Limits

KEY_PREFIX = "bk-"
MAX_FILE_BYTES = 4 << 20

_KEY_BYTES = 32
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_LIMITS = tuple(field.name for field in fields(Limits))


@dataclass(frozen=True, slots=True)
class Tenant:
    """`models`: the names it may ask for; None: all."""

    name: str
    models: frozenset[str] | None
    limits: Limits


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`key_id` names a key to people: the first digits of its hash."""

    key_id: str
    digest: bytes
    tenant: Tenant
    scopes: frozenset[str]


class BadKeyFile(Exception):
    """The file is not what it should be; the text says where."""


def digest_of(key: str) -> bytes:
    """What the file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def load_keys(path: Path) -> tuple[ApiKey, ...]:
    """The keys in the file; raises BadKeyFile, also where others could write to it."""
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
    document = _object(_json(raw), "the file", {"tenants", "keys"})
    listed = _object(document.get("tenants"), "tenants")
    tenants = {name: _tenant(name, entry) for name, entry in listed.items()}
    entries = document.get("keys")
    if not isinstance(entries, list):
        raise BadKeyFile("keys is not a list")
    return tuple(_key(entry, tenants, f"keys[{i}]") for i, entry in enumerate(entries))


def add_key(
    path: Path,
    tenant: str,
    scopes: frozenset[str],
    *,
    models: frozenset[str] | None = None,
    limits: Mapping[str, int] | None = None,
) -> str:
    """Draw a key, write its hash, return it: nothing can show it again.

    `models` and `limits` are of the tenant, and replace only what they name. Raises StartupFailed.
    """
    key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    digest = digest_of(key).hex()
    entry = {"id": digest[:8], "sha256": digest, "tenant": tenant, "scopes": sorted(scopes)}
    try:
        with _locked(path):
            document = _read_document(path)
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


def _read_document(path: Path) -> Any:
    if not path.exists():
        return {"tenants": {}, "keys": []}
    load_keys(path)
    return json.loads(path.read_bytes())


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time, by a lock on the folder: the file itself is replaced."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, raw: bytes) -> None:
    """Readers see the old file or the new one, never a part. A file that is new has mode 0600."""
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


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadKeyFile("not JSON") from error


def _object(value: Any, where: str, known: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadKeyFile(f"{where} is not an object")
    if known is not None and (unknown := value.keys() - known):
        raise BadKeyFile(f"{where} has unknown fields: {', '.join(sorted(unknown))}")
    return value


def _tenant(name: str, entry: Any) -> Tenant:
    where = f"tenant {name!r:.80}"
    if not _TENANT.match(name):
        raise BadKeyFile(f"{where}: a name is 1 to 64 of A-Z a-z 0-9 _ . -")
    settings = _object(entry, where, {"models", *_LIMITS})
    for limit in _LIMITS:
        value = settings.get(limit)
        if value is not None and (type(value) is not int or value < 1):
            raise BadKeyFile(f"{where}: {limit} is not a positive number")
    models = settings.get("models")
    limits = Limits(**{limit: settings.get(limit) for limit in _LIMITS})
    return Tenant(name, None if models is None else _names(models, f"{where}: models"), limits)


def _key(entry: Any, tenants: Mapping[str, Tenant], where: str) -> ApiKey:
    settings = _object(entry, where, {"id", "sha256", "tenant", "scopes"})
    digest, tenant = settings.get("sha256"), settings.get("tenant")
    if not isinstance(digest, str) or not _DIGEST.match(digest):
        raise BadKeyFile(f"{where}: sha256 is not 64 hex digits")
    if not isinstance(tenant, str) or tenant not in tenants:
        raise BadKeyFile(f"{where}: its tenant is not in tenants")
    scopes = _names(settings.get("scopes"), f"{where}: scopes")
    if not scopes <= SCOPES:
        raise BadKeyFile(f"{where}: scopes are {', '.join(sorted(SCOPES))}")
    return ApiKey(digest[:8], bytes.fromhex(digest), tenants[tenant], scopes)


def _names(value: Any, where: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadKeyFile(f"{where} is not a list of names")
    return frozenset(value)
