"""What lies around the attributes in an SPZ file: the header, and the compression.

Versions 2 and 3 are one gzip stream: a header of 16 bytes, then the attributes of all Gaussians, one after the other.
Version 4 begins with a header of 32 bytes that is not compressed, extensions, and a table of two uint64 for each
attribute: its bytes in the file, and unpacked. The attributes follow, a zstd frame each, with the bytes of version 3.

Extensions are records of a type, a length (uint32) and as many bytes; in versions 2 and 3 they follow the attributes.
All but one describe what a viewer may do. The one that says that the axes are others than right-up-back is refused.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard

VERSIONS = (2, 3, 4)
_MAGIC = b"NGSP"
_HEADER = struct.Struct("<4sIIBBBB")  # magic, version, count, SH degree, fractional bits, flags, attributes (version 4)
_HEADER_4 = 32  # bytes of version 4's header: the above, the position of the table (uint32), and zeros
_ANTIALIASED, _EXTENDED = 1, 2  # flags
_AXES = 0xADBE0003  # type of the extension that names the axes, as uint32
_RIGHT_UP_BACK = (0, 4)  # its values that change nothing: unspecified, and these axes
_THREADS = min(16, os.cpu_count() or 1)
_BLOCK = 1 << 20  # bytes that one thread compresses by gzip at a time
_LEVEL = 3  # of zstd; level 12 takes ten times as long to gain 2 %


class SpzError(ValueError):
    """A file is not an SPZ file that is read here, or Gaussians do not fit into one."""


@dataclass
class Header:
    """What all versions say about the attributes."""

    version: int
    count: int  # of Gaussians
    degree: int  # of harmonics
    bits: int  # of a position after the point
    antialiased: bool

    def widths(self) -> list[int]:
        """Bytes that positions, alphas, colours, scales, rotations and harmonics of a Gaussian take."""
        return [9, 1, 3, 3, 3 if self.version == 2 else 4, 3 * ((self.degree + 1) ** 2 - 1)]

    def attributes(self) -> int:
        """How many attributes version 4 holds: none for harmonics of degree 0."""
        return 6 if self.degree else 5


def pack(header: Header, attributes: Sequence[np.ndarray]) -> Iterator[bytes]:
    """The bytes of a file, in pieces, of attributes uint8 [count, width]. Equal Gaussians make equal files."""
    fields = (_MAGIC, header.version, header.count, header.degree, header.bits, int(header.antialiased))
    if header.version < 4:
        yield from _gzip(_HEADER.pack(*fields, 0) + b"".join(part.tobytes() for part in attributes))
        return
    parts = attributes[: header.attributes()]
    # Several threads also where there is one processor: they cut the data in other places than a single one does.
    frames = [zstandard.ZstdCompressor(_LEVEL, threads=_THREADS).compress(part.tobytes()) for part in parts]
    yield (_HEADER.pack(*fields, len(frames)) + struct.pack("<I", _HEADER_4)).ljust(_HEADER_4, b"\0")
    for frame, part in zip(frames, parts, strict=True):
        yield struct.pack("<QQ", len(frame), part.nbytes)
    yield from frames


def unpack(path: str | Path) -> tuple[Header, list[np.ndarray]]:
    """The header of a file and its six attributes, uint8 [count, width].

    Raises:
        SpzError: the file is damaged, or of another version, degree or axes.
    """
    content = Path(path).read_bytes()
    if content[:2] == b"\x1f\x8b":
        try:
            content = zlib.decompress(content, wbits=31)
        except zlib.error as error:
            raise SpzError(f"{path} is damaged: {error}.") from error
    if len(content) < _HEADER.size or content[:4] != _MAGIC:
        raise SpzError(f"{path} is not an SPZ file: it does not begin with 'NGSP', packed by gzip or not.")
    _, version, count, degree, bits, flags, attributes = _HEADER.unpack_from(content)
    header = Header(version, count, degree, bits, bool(flags & _ANTIALIASED))
    if version not in VERSIONS:
        raise SpzError(f"{path} has SPZ version {version}; versions 2, 3 and 4 are read. Convert it to one, or to PLY.")
    if degree > 3:
        raise SpzError(f"{path} has harmonics of degree {degree}; degrees 0 to 3 are read.")
    if version == 4:
        extensions, parts = _unpack_zstd(path, content, header, attributes)
    else:
        ends = _HEADER.size + count * np.cumsum(header.widths())
        _check_length(path, content, int(ends[-1]), header)
        _, *parts, extensions = np.split(np.frombuffer(content, np.uint8), [_HEADER.size, *ends])
    if flags & _EXTENDED:
        _check_axes(path, extensions)
    return header, [
        np.frombuffer(part, np.uint8).reshape(count, width) for part, width in zip(parts, header.widths(), strict=True)
    ]


def _unpack_zstd(path: str | Path, content: bytes, header: Header, attributes: int) -> tuple[bytes, list[bytes]]:
    """The extensions and the six attributes of version 4; what the table says is checked before it is made room for."""
    _check_length(path, content, _HEADER_4, header)
    (table,) = struct.unpack_from("<I", content, _HEADER.size)
    if table < _HEADER_4 or attributes < header.attributes():
        raise SpzError(f"{path} is damaged: a table of {attributes} attributes at byte {table}.")
    position = table + 16 * attributes
    _check_length(path, content, position, header)
    frames = []
    for i, width in enumerate(header.widths()[: header.attributes()]):
        packed, unpacked = struct.unpack_from("<QQ", content, table + 16 * i)
        _check_length(path, content, position + packed, header)
        frame = content[position : position + packed]
        try:
            stated = zstandard.frame_content_size(frame)  # -1: not stated
        except zstandard.ZstdError as error:
            raise SpzError(f"{path} is damaged: {error}.") from error
        size = header.count * width
        wrong = [found for found in (unpacked, stated) if found not in (size, -1)]
        if wrong:
            raise SpzError(f"{path} is damaged: attribute {i} has {wrong[0]:,} bytes, {size:,} are expected.")
        frames.append((frame, size))
        position += packed

    def decompress(frame_and_size: tuple[bytes, int]) -> bytes:
        frame, size = frame_and_size
        try:
            part = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
        except zstandard.ZstdError as error:
            raise SpzError(f"{path} is damaged: {error}.") from error
        if len(part) != size:
            raise SpzError(f"{path} is damaged: an attribute has {len(part):,} bytes of {size:,}.")
        return part

    with ThreadPoolExecutor(_THREADS) as pool:
        parts = list(pool.map(decompress, frames))
    return content[_HEADER_4:table], parts if header.degree else [*parts, b""]  # no harmonics


def _check_length(path: str | Path, content: bytes, needed: int, header: Header) -> None:
    if len(content) < needed:
        raise SpzError(
            f"{path} is cut short: {len(content):,} bytes of at least {needed:,} for {header.count:,} Gaussians."
        )


def _check_axes(path: str | Path, extensions: bytes) -> None:
    """Refuses Gaussians in axes that would be read as if they were right-up-back."""
    position = 0
    while position + 12 <= len(extensions):
        kind, size, value = struct.unpack_from("<III", extensions, position)
        if kind == _AXES and value not in _RIGHT_UP_BACK:
            raise SpzError(
                f"{path} has axes of its own (extension {kind:#x}, value {value}); only right-up-back is read. "
                "Convert it to PLY with a program that knows the extension."
            )
        position += 8 + size


def _gzip(data: bytes) -> Iterator[bytes]:
    """One gzip member, its blocks compressed by several threads.

    Each block but the last ends at a byte (a sync flush), and starts with the window of the one before as its
    dictionary, so that together they are one ordinary deflate stream.
    """
    starts = range(0, len(data), _BLOCK)

    def deflate(start: int) -> bytes:
        window = data[max(0, start - 32768) : start]
        packer = zlib.compressobj(4, wbits=-15, zdict=window)  # level 6 takes five times as long to gain 5 %
        end = zlib.Z_FINISH if start == starts[-1] else zlib.Z_SYNC_FLUSH
        return packer.compress(data[start : start + _BLOCK]) + packer.flush(end)

    yield b"\x1f\x8b\x08\0\0\0\0\0\0\xff"  # no name, no time
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(deflate, starts)
    yield struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)
