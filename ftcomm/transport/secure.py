"""Protects frames of the data plane between hosts as FTCOMM_DATA says: not at all, with a MAC, or with AES-GCM.

A job trusts its network with data by default, since a MAC takes processor time for every byte. With "mac" an attacker
on the path cannot change, repeat or inject data; with "aes-gcm" it cannot read them either. The keys are those of the
handshake of each connection (`ftcomm.control.sealed`), and the numbers of records are the nonces. After `REKEY` records
there is a new key, so that no key is used for more than half a terabyte. `cryptography` does the work; its AES-GCM is
several times as fast as what the standard library has.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ftcomm.control.sealed import RECORD, TAG, Buffer, Channel, Connection, Keys, Seal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

REKEY = 1 << 22  # records
_LENGTH = 4  # bytes in front of a record


def plane(connection: Connection, mode: str) -> Connection:
    """Turns a connection that was just dialled or accepted into one for data. One without a handshake stays what it
    is."""
    if not isinstance(connection, Channel):
        return connection
    if mode == "none":
        return connection.detach()
    return connection.resealed(seals(connection.keys, mode))


def seals(keys: Keys, mode: str) -> tuple[Seal, Seal]:
    """Returns the seals for sending and for receiving."""
    makers: dict[str, type[Gmac] | type[AesGcm]] = {"mac": Gmac, "aes-gcm": AesGcm}
    make = makers[mode]
    return make(keys.of(mode, sending=True)), make(keys.of(mode, sending=False))


class _Numbered:
    """One direction of a connection; see `Seal`."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0
        self._scratch = memoryview(bytearray(_LENGTH + RECORD + TAG))
        self._aes = self._cipher()

    def _next(self) -> tuple[AESGCM, bytes]:
        """Returns the key and the nonce of the next record, which are never used together again."""
        if self._count == REKEY:
            self._count = 0
            self._key = hmac.digest(self._key, b"next", "sha256")
            self._aes = self._cipher()
        self._count += 1
        return self._aes, self._count.to_bytes(12, "big")

    def _cipher(self) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # an optional dependency

        return AESGCM(self._key)

    def _begin(self, nbytes: int) -> memoryview:
        """Makes room for a record of `nbytes` of payload, with its length in front."""
        record = self._scratch[: _LENGTH + nbytes + TAG]
        record[:_LENGTH] = nbytes.to_bytes(_LENGTH, "big")
        return record


class Gmac(_Numbered):
    """A MAC: AES-GCM that encrypts nothing."""

    def seal(self, payload: Sequence[Buffer], nbytes: int) -> memoryview:
        record = self._begin(nbytes)
        at = _LENGTH
        for part in payload:
            record[at : at + len(part)] = part
            at += len(part)
        aes, nonce = self._next()
        record[at:] = aes.encrypt(nonce, b"", record[_LENGTH:at])
        return record

    def open(self, sealed: memoryview) -> memoryview:
        from cryptography.exceptions import InvalidTag

        aes, nonce = self._next()
        try:
            aes.decrypt(nonce, sealed[-TAG:], sealed[:-TAG])
        except InvalidTag:
            raise ValueError("a wrong MAC") from None
        return sealed[:-TAG]


class AesGcm(_Numbered):
    """AES-256-GCM."""

    def seal(self, payload: Sequence[Buffer], nbytes: int) -> memoryview:
        record = self._begin(nbytes)
        whole = payload[0] if len(payload) == 1 else b"".join(payload)
        aes, nonce = self._next()
        aes.encrypt_into(nonce, whole, None, record[_LENGTH:])
        return record

    def open(self, sealed: memoryview) -> memoryview:
        from cryptography.exceptions import InvalidTag

        plain = self._scratch[: len(sealed) - TAG]
        aes, nonce = self._next()
        try:
            aes.decrypt_into(nonce, sealed, None, plain)
        except InvalidTag:
            raise ValueError("a wrong MAC") from None
        return plain
