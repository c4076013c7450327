"""Tensors in safetensors files: one file, a folder of shards, a snapshot of the hub's cache. Mapped, never copied.

A file is the length n of the header (8 bytes, little-endian), n bytes of JSON, and the data, without holes. The parser
is our own because safetensors' NumPy side refuses every F8, F4 and F6 tensor and copies the rest.
Source: https://github.com/huggingface/safetensors, README and safetensors/src/tensor.rs.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import reprlib
import stat
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import ml_dtypes
import numpy as np

HEADER_MAX = 100_000_000  # bytes of JSON; the format's own limit
DIMENSIONS_MAX = 64  # NumPy's
_BYTES_MAX = 2**63 - 1  # NumPy's, which also counts the dimensions beside a 0
_DIGITS_MAX = 20  # of an integer: 2^64 has 20, and Python's int() is slow on millions of them
_DEPTH_MAX = 500  # of JSON; a valid header has three levels, beside what it may hold under unknown keys
_TOKENS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_LONG_INTEGER = re.compile(rb"[0-9]{%d}" % (_DIGITS_MAX + 1))
_INDEX, _SUFFIX = "model.safetensors.index.json", ".safetensors"


@dataclass(frozen=True)
class _Element:
    bits: int
    dtype: np.dtype | None  # of the view; None: there is no such view


def _native(code: str) -> _Element:
    dtype = np.dtype(code)
    return _Element(8 * dtype.itemsize, dtype)


_ELEMENTS = {
    "F4": _Element(4, np.dtype(np.uint8)),
    "F6_E2M3": _Element(6, None),
    "F6_E3M2": _Element(6, None),
    "F8_E4M3": _Element(8, np.dtype(ml_dtypes.float8_e4m3fn)),
    "F8_E5M2": _Element(8, np.dtype(ml_dtypes.float8_e5m2)),
    "F8_E8M0": _Element(8, np.dtype(ml_dtypes.float8_e8m0fnu)),
    "F8_E4M3FNUZ": _Element(8, np.dtype(ml_dtypes.float8_e4m3fnuz)),
    "F8_E5M2FNUZ": _Element(8, np.dtype(ml_dtypes.float8_e5m2fnuz)),
    "BF16": _Element(16, np.dtype(ml_dtypes.bfloat16)),
    "F16": _native("<f2"),
    "F32": _native("<f4"),
    "F64": _native("<f8"),
    "C64": _native("<c8"),
    "I8": _native("i1"),
    "I16": _native("<i2"),
    "I32": _native("<i4"),
    "I64": _native("<i8"),
    "U8": _native("u1"),
    "U16": _native("<u2"),
    "U32": _native("<u4"),
    "U64": _native("<u8"),
    "BOOL": _native("?"),
}

_brief = reprlib.Repr()  # what was found may be 100 MB long, or a thousand lists deep
_brief.maxstring = 200
_brief.maxlong = 80


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it stands; the message names the file, the tensor and what is allowed.

    Attributes
    ----------
    file, tensor : str
        Where: the tensor that is wrong or missing, empty where it is all of the file; both where a module is.
    what : str
        The message without them, empty where it is about a module.
    todo : str
        What to do, where the message does not say it.
    """

    file = tensor = what = todo = ""

    @classmethod
    def of(cls, file: Path, what: str, tensor: str | None = None) -> CheckpointError:
        """The error about a file, or a tensor in it."""
        where = _legible(str(file))
        error = cls(f"{where}: {'' if tensor is None else f'tensor {_brief.repr(tensor)}: '}{what}")
        error.file, error.tensor, error.what = where, tensor or "", what
        return error


def _fail(file: Path, what: str, tensor: str | None = None) -> NoReturn:
    raise CheckpointError.of(file, what, tensor) from None


def _legible(text: str) -> str:
    # File names may hold bytes that are not UTF-8, which Python keeps as lone surrogates and no terminal prints.
    return text.encode("utf-8", "backslashreplace").decode()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


class Map(mmap.mmap):
    """All bytes of a file, read-only; and the file, open as long as the map is there, to read much of it at once."""

    @classmethod
    def of(cls, file: Path, stream: BinaryIO) -> Map:
        """The map of an open file of that path."""
        made = cls(stream.fileno(), 0, access=mmap.ACCESS_READ)
        made._file, made._descriptor = file, os.dup(stream.fileno())
        weakref.finalize(made, os.close, made._descriptor)
        return made

    def read_into(self, buffer: np.ndarray, offset: int) -> None:
        """Fill an array of uint8 with what the file has from an offset on, without the GIL and without a page fault.

        Raises
        ------
        CheckpointError
            If the file ends before, for it was cut short while it was mapped, or cannot be read. Views of the map would
            end the process with SIGBUS then.
        """
        done = 0
        while done < buffer.size:
            try:
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                _fail(self._file, f"byte {offset + done} on: cannot be read: {_reason(error)}")
            if not count:
                end = os.fstat(self._descriptor).st_size
                what = f"{buffer.size} bytes from byte {offset} on were there when it was mapped"
                _fail(self._file, f"the file ends at byte {end}, but {what}; get it again, and open it again")
            done += count


class _Shard:
    """One file: its path, its state when the header was read, and its bytes once one of its tensors is asked for."""

    def __init__(self, file: Path, state: os.stat_result) -> None:
        self.file = file
        self.closed = False
        self._state = self._identity(state)
        self._bytes: np.ndarray | None = None

    @staticmethod
    def _identity(state: os.stat_result) -> tuple[int, ...]:
        return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns

    def mapped(self, tensor: str) -> np.ndarray:
        """All bytes of the file, uint8 [size], read-only; mapped at the first call, for the tensor of that name."""
        if self.closed:
            _fail(self.file, "the file is closed; take the arrays before close()", tensor)
        mapped = self._bytes  # a local name, for close() may come from another thread
        if mapped is None:
            try:
                with self.file.open("rb") as stream:
                    # The offsets were checked against the file of that time: with another one they may lie outside.
                    if self._identity(os.fstat(stream.fileno())) != self._state:
                        _fail(self.file, "the file has changed since its header was read; open it again", tensor)
                    mapped = np.frombuffer(Map.of(self.file, stream), np.uint8)
            except (OSError, OverflowError) as error:
                _fail(self.file, f"the file cannot be mapped: {_reason(error)}", tensor)
            self._bytes = mapped
        return mapped

    def close(self) -> None:
        # The map is only let go, for mmap.close() would take it from under the views; the last of them frees it.
        self.closed = True
        self._bytes = None


@dataclass(frozen=True)
class Stored:
    """A tensor as it lies in its file.

    Attributes
    ----------
    name : str
        The key in the header.
    dtype : str
        As in the header: "F8_E4M3", "BF16", ...
    shape : tuple of int
        As in the header; of an F4 or F6 tensor it counts the elements, not the bytes.
    file : Path
        Where it lies; not resolved if that is a symlink.
    offset : int
        Of its first byte from the beginning of the file; no alignment is promised.
    nbytes : int
        Bytes in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    _shard: _Shard = field(repr=False, compare=False)

    @property
    def array(self) -> np.ndarray:
        """The tensor as a read-only view over the memory map, of that shape; nothing is copied or read before its use.

        BF16 and the F8 types have ml_dtypes' dtypes (F8_E4M3 is float8_e4m3fn, F8_E8M0 float8_e8m0fnu), the others
        NumPy's. F4 is uint8 with the last dimension halved: two codes in a byte, the even column in the low nibble.
        The view stays valid after the `Files` it came from is closed. A file cut short while it is mapped ends the
        process with SIGBUS, as every map does, but for what goes to a GPU by `cufp8.staging`, which raises.

        Raises
        ------
        TypeError
            If the dtype is F6_E2M3 or F6_E3M2: NumPy has no view of 6-bit elements.
        CheckpointError
            If the files are closed, if this one changed since it was opened, or if the last dimension of an F4 tensor
            is odd.
        """
        element = _ELEMENTS[self.dtype]
        if element.dtype is None:
            views = ", ".join(name for name, e in _ELEMENTS.items() if e.dtype is not None)
            where = f"{_legible(str(self.file))}: tensor {_brief.repr(self.name)}"
            raise TypeError(f"{where}: {self.dtype} packs 6-bit elements, which no NumPy array can view; {views} can.")
        shape = self.shape
        if element.bits == 4:
            if shape[-1] % 2:
                allowed = "a byte holds two neighbours of a row, so the last dimension must be even"
                _fail(self.file, f"F4 of shape {list(shape)} has rows that end inside a byte; {allowed}", self.name)
            shape = (*shape[:-1], shape[-1] // 2)
        mapped = self._shard.mapped(self.name)
        return mapped[self.offset : self.offset + self.nbytes].view(element.dtype).reshape(shape)


class Files(Mapping[str, Stored]):
    """Tensor name -> `Stored`, over all files of a checkpoint: by file name, then by offset. Made by `open`.

    A context manager. Once closed it still lists the tensors, but gives no new arrays; those taken before stay valid.
    A name that is not there raises KeyError, as in every mapping.

    Attributes
    ----------
    path : Path
        What was opened.
    metadata : dict of Path to dict of str to str
        `__metadata__` of each file, empty where there is none.
    """

    def __init__(self, path: Path, tensors: dict[str, Stored], metadata: dict[Path, dict[str, str]]) -> None:
        self.path = path
        self.metadata = metadata
        self._tensors = tensors

    def __getitem__(self, name: str) -> Stored:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __repr__(self) -> str:
        return f"Files({str(self.path)!r}: {len(self)} tensors in {len(self.metadata)} files)"

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the maps. Safe to repeat; the arrays that were taken keep theirs."""
        for tensor in self._tensors.values():
            tensor._shard.close()


def open(path: str | os.PathLike[str]) -> Files:
    """Open a checkpoint: every header is read once and checked whole, the data not at all.

    Parameters
    ----------
    path : str or path
        A safetensors file; an index (`*.safetensors.index.json`); a folder with `model.safetensors.index.json`, with
        one other index, or with `*.safetensors` files and no index (hidden ones are left out); or a folder
        `models--*` of the hub's cache, of which `refs/main`, or else the only snapshot, is read. Files may be symlinks,
        as they are there. With an index only the files that it names are read.

    Returns
    -------
    Files
        Tensor name -> `Stored`.

    Raises
    ------
    CheckpointError
        If there is no such file, or anything in a header or in the index breaks a rule of the format.
    """
    path = Path(path)
    if stat.S_ISDIR(_stat(path).st_mode):
        return _open_folder(path)
    if path.name.endswith(".index.json"):
        return _open_index(path, path)
    return _gather(path, [path], None)


def _stat(file: Path) -> os.stat_result:
    try:
        return os.stat(file)
    except (OSError, ValueError) as error:
        _fail(file, f"cannot be opened: {_reason(error)}; a safetensors file or a folder of them is needed")


def _open_regular(file: Path) -> BinaryIO:
    # Looked at before it is opened: opening a pipe waits for a writer.
    if not stat.S_ISREG(_stat(file).st_mode):
        _fail(file, "is not a regular file; a safetensors file or a folder of them is needed")
    try:
        return file.open("rb")
    except OSError as error:
        _fail(file, f"cannot be opened: {_reason(error)}")


def _open_folder(folder: Path) -> Files:
    names = _names(folder)
    indexes = [name for name in names if name.endswith(_SUFFIX + ".index.json")]
    if _INDEX in indexes:
        return _open_index(folder / _INDEX, folder)
    if len(indexes) > 1:
        _fail(folder, f"has the indexes {', '.join(map(_brief.repr, indexes))}; open one of them by its path")
    if indexes:
        return _open_index(folder / indexes[0], folder)
    shards = [folder / name for name in names if name.endswith(_SUFFIX)]
    if shards:
        return _gather(folder, shards, None)
    if "snapshots" in names:
        return _open_folder(_snapshot(folder))
    _fail(folder, f"holds neither *{_SUFFIX} nor {_INDEX}; one of them is needed")


def _names(folder: Path) -> list[str]:
    try:
        return sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        _fail(folder, f"cannot be listed: {_reason(error)}")


def _snapshot(folder: Path) -> Path:
    """The folder of files inside a `models--*` folder of the hub's cache."""
    snapshots = _names(folder / "snapshots")
    main = folder / "refs" / "main"
    if os.path.isfile(main):
        with _open_regular(main) as stream:
            # Looked up among what is there before it joins the path, so it cannot lead out of the folder.
            revision = _read(stream, 1000, main).decode("utf-8", "replace").strip()
        if revision not in snapshots:
            _fail(main, f"names the snapshot {_brief.repr(revision)}, which is not in {folder / 'snapshots'}")
        found = folder / "snapshots" / revision
    elif len(snapshots) == 1:
        found = folder / "snapshots" / snapshots[0]
    else:
        _fail(folder, f"has {len(snapshots)} snapshots and no refs/main; open one of them by its path")
    # A snapshot that holds only a folder `snapshots` could otherwise send the search around a loop of symlinks.
    if not any(name.endswith((_SUFFIX, _SUFFIX + ".index.json")) for name in _names(found)):
        _fail(found, f"holds neither *{_SUFFIX} nor {_INDEX}; one of them is needed")
    return found


def _open_index(index: Path, path: Path) -> Files:
    with _open_regular(index) as stream:
        text = _read(stream, HEADER_MAX + 1, index)
    if len(text) > HEADER_MAX:
        _fail(index, f"the index is longer than the {HEADER_MAX} bytes that are allowed")
    content = _json_object(text, index, "the index")
    places = content.get("weight_map")
    if not isinstance(places, dict) or not places:
        found = _brief.repr(places) if "weight_map" in content else "nothing"
        _fail(index, f"weight_map is {found}; it must be an object of tensor name to file name, with one at least")
    for name, shard in places.items():
        _check_shard_name(shard, name, index)
    shards = [index.parent / name for name in sorted(set(places.values()))]
    for file in shards:
        try:
            os.stat(file)
        except (OSError, ValueError) as error:
            tensor = next(name for name, shard in places.items() if shard == file.name)
            _fail(index, f"its shard {_brief.repr(file.name)} cannot be opened: {_reason(error)}", tensor)
    files = _gather(path, shards, (index, places))
    for name, shard in places.items():
        if name not in files:
            _fail(index.parent / shard, f"is not in this file, where {index.name} says it is", name)
    return files


def _check_shard_name(shard: Any, tensor: str, index: Path) -> None:
    # A shard may be a symlink out of the folder, as in the hub's cache: those were made on this machine. The name
    # came with the download, so it must not choose a place. Both separators and drives count on every system.
    if not (
        isinstance(shard, str)
        and shard.endswith(_SUFFIX)
        and shard.isprintable()
        and not any(separator in shard for separator in "/\\:")
    ):
        allowed = f"a plain file name that ends in {_SUFFIX}, without a folder or a drive"
        _fail(index, f"its shard is {_brief.repr(shard)}; allowed is {allowed}", tensor)


def _gather(path: Path, files: list[Path], index: tuple[Path, dict[str, str]] | None) -> Files:
    tensors: dict[str, Stored] = {}
    metadata: dict[Path, dict[str, str]] = {}
    for file in files:
        with _open_regular(file) as stream:
            state = os.fstat(stream.fileno())
            try:
                metadata[file], entries = read_header(stream, state.st_size, file)
            except CheckpointError as error:
                error.todo = "get the file again, or make it again"
                raise
        shard, own = _Shard(file, state), file.name
        for name, dtype, shape, offset, nbytes in entries:
            if index is not None and (place := index[1].get(name)) != own:
                said = "does not name it" if place is None else f"places it in {_brief.repr(place)}"
                _fail(file, f"is in this file, but {index[0].name} {said}; they must agree", name)
            if name in tensors:
                _fail(file, f"is in {_brief.repr(tensors[name].file.name)} too; a name may stand in one file", name)
            tensors[name] = Stored(name, dtype, shape, file, offset, nbytes, shard)
    return Files(path, tensors, metadata)


def _read(stream: BinaryIO, count: int, file: Path) -> bytes:
    try:
        return stream.read(count)
    except (OSError, MemoryError) as error:
        _fail(file, f"cannot be read: {_reason(error)}")


Entry = tuple[str, str, tuple[int, ...], int, int]


def read_header(stream: BinaryIO, size: int, file: Path) -> tuple[dict[str, str], list[Entry]]:
    """Read and check the header of a safetensors file.

    Parameters
    ----------
    stream : binary file
        At its beginning; read up to the end of the header.
    size : int
        Bytes of the whole file.
    file : Path
        For the messages.

    Returns
    -------
    metadata : dict of str to str
        `__metadata__`, empty where there is none.
    entries : list of (name, dtype, shape, offset, nbytes)
        By offset, which counts from the beginning of the file.

    Raises
    ------
    CheckpointError
        If anything breaks a rule of the format.
    """
    start = _read(stream, 8, file)
    if len(start) < 8:
        _fail(file, f"has {len(start)} bytes; a safetensors file has the 8 bytes of its header's length at least")
    length = int.from_bytes(start, "little")
    if length > HEADER_MAX:
        _fail(file, f"the header's length is {length}; at most {HEADER_MAX} is allowed. Is this a safetensors file?")
    if length > size - 8:
        _fail(file, f"the header's length is {length}, but {size - 8} bytes follow; the file is cut short, or not one")
    text = _read(stream, length, file)
    if len(text) < length:
        _fail(file, f"the header ends after {len(text)} of its {length} bytes; the file is cut short")
    header = _json_object(text, file, "the header")
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(type(value) is str for value in metadata.values()):
        _fail(file, f"__metadata__ is {_brief.repr(metadata)}; it must be an object of strings")
    room = size - 8 - length
    spans = sorted((*_entry(name, value, room, file), name) for name, value in header.items())
    end = 0
    for begin, stop, _, _, name in spans:
        if begin != end:
            what = "overlaps" if begin < end else "leaves a hole after"
            _fail(file, f"begins at {begin} and {what} the data before, which end at {end}; it must begin there", name)
        end = stop
    if end != room:
        _fail(file, f"{room} bytes of data follow the header, but the tensors end at {end}; no byte may be left over")
    base = 8 + length
    return metadata, [(name, dtype, shape, base + b, s - b) for b, s, dtype, shape, name in spans]


def _entry(name: str, value: Any, room: int, file: Path) -> tuple[int, int, str, tuple[int, ...]]:
    """Begin and end in the data, dtype and shape of a checked entry; keys beyond those three are left out."""
    if not isinstance(value, dict):
        _fail(file, f"its entry is {_brief.repr(value)}; it must be an object of dtype, shape and data_offsets", name)
    for key in ("dtype", "shape", "data_offsets"):
        if key not in value:
            _fail(file, f"its entry has no {key}; it must have dtype, shape and data_offsets", name)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    element = _ELEMENTS.get(dtype) if isinstance(dtype, str) else None
    if element is None:
        _fail(file, f"its dtype is {_brief.repr(dtype)}; known are {', '.join(_ELEMENTS)}", name)
    if not _counts(shape) or len(shape) > DIMENSIONS_MAX:
        allowed = f"a list of at most {DIMENSIONS_MAX} non-negative integers"
        _fail(file, f"its shape is {_brief.repr(shape)}; it must be {allowed}", name)
    count = math.prod(shape)
    if (count or math.prod(n or 1 for n in shape)) * max(element.bits, 8) > 8 * _BYTES_MAX:
        _fail(
            file,
            f"its shape is {_brief.repr(shape)}, more than the {_BYTES_MAX} elements or bytes an array may have",
            name,
        )
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(file, f"its data_offsets are {_brief.repr(offsets)}; they must be two integers from 0 on, in order", name)
    if offsets[1] > room:
        what = f"its data_offsets are {_brief.repr(offsets)}, but {room} bytes of data follow the header"
        _fail(file, f"{what}; the file is cut short, or not what its header says", name)
    bits = count * element.bits
    if bits != 8 * (offsets[1] - offsets[0]):
        need = f"{bits // 8} bytes" if bits % 8 == 0 else f"{bits // 8} bytes and {bits % 8} bits"
        what = f"{dtype} of shape {_brief.repr(shape)} needs {need}"
        _fail(file, f"{what}, but data_offsets {offsets} hold {offsets[1] - offsets[0]}; they must be equal", name)
    return offsets[0], offsets[1], dtype, tuple(shape)


def _counts(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    for n in value:
        if type(n) is not int or n < 0:  # `type`, for True is an instance of int
            return False
    return True


def _json_object(text: bytes, file: Path, what: str) -> dict[str, Any]:
    """The JSON object in `text`, with no key twice in any object; a deep or huge one ends in a CheckpointError too."""
    deep = f"{what} is JSON nested too deeply; a valid one has three levels"
    # Python's own limit stops the parser, unless the program raised it: then the C stack ends first, and the process.
    if sys.getrecursionlimit() > 1000 and _is_deep(text):
        _fail(file, deep)
    try:
        found = json.loads(
            # Decoded here: of bytes, json.loads takes UTF-16 and UTF-32 as well.
            text.decode("utf-8"),
            object_pairs_hook=_unique_keys(file, what, escapes=b"\\u" in text),
            # Only where it can matter: called for each of four numbers a tensor, it doubles the time of the parser.
            parse_int=_integer if _LONG_INTEGER.search(text) else None,
            parse_constant=_constant,
        )
    except CheckpointError:
        raise
    except RecursionError:
        _fail(file, deep)
    except (ValueError, MemoryError) as error:
        _fail(file, f"{what} is not JSON in UTF-8: {_reason(error)}")
    if not isinstance(found, dict):
        _fail(file, f"{what} is {_brief.repr(found)}; it must be a JSON object")
    return found


def _is_deep(text: bytes) -> bool:
    depth = 0
    for token in _TOKENS.finditer(text):
        first = token[0][:1]
        if first in b"[{":
            depth += 1
            if depth > _DEPTH_MAX:
                return True
        elif first in b"]}":
            depth -= 1
    return False


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > _DIGITS_MAX:
        raise ValueError(f"an integer of {len(digits)} digits; at most {_DIGITS_MAX} are allowed")
    return int(digits)


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _unique_keys(file: Path, what: str, escapes: bool) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    _fail(file, f"{what} has the key twice in one object; once is allowed", key)
                seen.add(key)
        if escapes:
            # They can spell half of a surrogate pair, which is no character and cannot be printed: this raises.
            for key, value in found.items():
                key.encode("utf-8")
                if type(value) is str:
                    value.encode("utf-8")
        return found

    return build
