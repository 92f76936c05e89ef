"""Reads the validity periods of the certificates in a PEM file from their DER. The ssl module
provides these times only for peers' certificates.

    Certificate: SEQUENCE { TBSCertificate: SEQUENCE {
        [0] version (may be absent), serial INTEGER, algorithm SEQUENCE, issuer SEQUENCE,
        validity SEQUENCE { notBefore, notAfter }, ... } ... }            (RFC 5280, section 4.1)
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _VERSION, _UTC_TIME, _GENERALIZED_TIME = 0x30, 0xA0, 0x17, 0x18


@dataclass(frozen=True, slots=True)
class Validity:
    """The period in which a certificate is valid, in seconds of Unix time."""

    from_s: float
    until_s: float


def validities(pem: bytes) -> list[Validity]:
    """The validity of each certificate, in the order of the file; raises ValueError."""
    found = [_validity(ssl.PEM_cert_to_DER_cert(each.decode())) for each in _PEM.findall(pem)]
    if not found:
        raise ValueError("there is no certificate, PEM, in the file")
    return found


def _validity(der: bytes) -> Validity:
    tbs, _ = _read(_read(der, _SEQUENCE)[0], _SEQUENCE)
    if tbs[:1] == bytes((_VERSION,)):
        _, tbs = _read(tbs, _VERSION)
    for _ in range(3):  # serial, algorithm, issuer
        _, tbs = _read(tbs)
    times, _ = _read(tbs, _SEQUENCE)
    first_tag, second = times[:1], _read(times)[1]
    return Validity(_time(first_tag, _read(times)[0]), _time(second[:1], _read(second)[0]))


def _read(der: bytes, tag: int | None = None) -> tuple[bytes, bytes]:
    """The content of the first DER element, and the bytes after it; raises ValueError."""
    if len(der) < 2 or (tag is not None and der[0] != tag):
        raise ValueError("what the file has is no certificate")
    length, start = der[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(der[2:start], "big")
    if start + length > len(der):
        raise ValueError("a certificate in the file is cut off")
    return der[start : start + length], der[start + length :]


def _time(tag: bytes, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == bytes((_UTC_TIME,)):  # two digits of the year: 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    elif tag != bytes((_GENERALIZED_TIME,)):
        raise ValueError("a certificate's time is of no known kind")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
