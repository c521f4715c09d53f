"""Decodes bytes from elsewhere into a struct, with one kind of error for all that may be wrong with them."""

from __future__ import annotations

from typing import Any

import msgspec


def learn(*kinds: Any) -> None:
    """Let msgspec learn these types now, as a `Decoder` of a module does. Otherwise it does so at their first use, and
    two threads that use one for the first time at once end the process (SIGSEGV, msgspec 0.22). For modules: each is
    imported by one thread."""
    for kind in kinds:
        msgspec.json.Decoder(kind)


def decode_with(decoder: msgspec.msgpack.Decoder[Any] | msgspec.json.Decoder[Any], data: bytes | bytearray) -> Any:
    """Decodes `data`. Raises only `msgspec.DecodeError`.

    The decoders of msgspec also raise `UnicodeDecodeError` on a string that is not UTF-8 and `RecursionError` on deep
    nesting, and neither is a `DecodeError`.
    """
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
