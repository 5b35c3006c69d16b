"""Header blocks (HPACK, RFC 7541).

What we send never touches the peer's dynamic table, so that it needs no state and is the same bytes
for every stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias, final

import hpack
from hpack.huffman_table import decode_huffman

from regrow.errors import ProtocolError
from regrow.wire import frames

Headers: TypeAlias = Mapping[bytes, bytes]

STATUS_200: Final = b"\x88"  # index 8 of the static table

# Fields that are in a table already, of one byte each.
_INDEXED: Final = re.compile(rb"[\x80-\xfe]*")
_LITERAL: Final = 0x00  # not indexed, with a name of its own
_ONE_BYTE_LENGTH: Final = 0x7F
_MAX_CACHED: Final = 64


def encode(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Literal fields, not indexed, no Huffman code."""
    return b"".join(
        b"\0" + _integer(len(name)) + name + _integer(len(value)) + value for name, value in fields
    )


def _integer(value: int) -> bytes:
    return bytes(hpack.hpack.encode_integer(value, 7))


@final
class HeaderDecoder:
    """Reads the header blocks of one connection, which have to come in order.

    hpack takes some 60 us for a request. But nearly all requests of a connection are a run of
    indexed fields, the same for each call of a method, and at most a literal that no table keeps:
    what the run stands for is remembered until a block changes the table.
    """

    def __init__(self, max_list_bytes: int) -> None:
        self._decoder = hpack.Decoder(max_list_bytes)
        self._runs: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """The fields of a block; of a name that is there twice, the last.

        Raises:
            ProtocolError: The block is damaged, or larger than the limit.
        """
        match = _INDEXED.match(block)
        run = match.group() if match is not None else b""
        literals = _literals(block, len(run))
        if literals is None:
            self._runs.clear()
            return self._decode(block)
        fields = self._runs.get(run)
        if fields is None:
            if len(self._runs) == _MAX_CACHED:
                self._runs.clear()
            fields = self._runs[run] = self._decode(run)
        return {**fields, **literals} if literals else fields

    def _decode(self, block: bytes) -> Headers:
        try:
            return dict(self._decoder.decode(block, raw=True))
        except hpack.OversizedHeaderListError as error:
            raise ProtocolError(
                "the request's headers are too large", frames.ENHANCE_YOUR_CALM
            ) from error
        except hpack.HPACKError as error:
            raise ProtocolError(
                f"the header block is damaged: {error}", frames.COMPRESSION_ERROR
            ) from error


def _literals(block: bytes, position: int) -> Headers | None:
    """The fields from `position` on, if all are short literals that no table keeps."""
    fields: dict[bytes, bytes] = {}
    while position < len(block):
        if block[position] != _LITERAL or position + 1 >= len(block):
            return None
        name_end = position + 2 + block[position + 1]
        if block[position + 1] >= _ONE_BYTE_LENGTH or name_end >= len(block):
            return None
        length = block[name_end] & 0x7F
        end = name_end + 1 + length
        if length == _ONE_BYTE_LENGTH or end > len(block):
            return None
        value = block[name_end + 1 : end]
        if block[name_end] & 0x80:
            try:
                value = decode_huffman(value)
            except hpack.HPACKDecodingError:
                return None  # told by the complete decoder
        fields[block[position + 2 : name_end]] = value
        position = end
    return fields
