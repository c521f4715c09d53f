"""Bytes from elsewhere to a struct, with one kind of error whatever is wrong with them."""

from __future__ import annotations

from typing import Any

import msgspec


def decode_with(decoder: msgspec.msgpack.Decoder[Any] | msgspec.json.Decoder[Any], data: bytes | bytearray) -> Any:
    """Raises `msgspec.DecodeError`, and nothing else.

    The decoders of msgspec raise `UnicodeDecodeError` on a string that is no UTF-8 and `RecursionError` on deep
    nesting, neither of which is a `DecodeError`.
    """
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None
