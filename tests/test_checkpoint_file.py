"""The file layer: what a safetensors file holds, seen through a map; and every way in which a file can be wrong."""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cufp8.checkpoint import CheckpointError, Files, Stored, file

# The safetensors string, the dtype of the view, bits of an element.
VIEWS = {
    "F4": (np.uint8, 4),
    "F8_E4M3": (ml_dtypes.float8_e4m3fn, 8),
    "F8_E5M2": (ml_dtypes.float8_e5m2, 8),
    "F8_E8M0": (ml_dtypes.float8_e8m0fnu, 8),
    "F8_E4M3FNUZ": (ml_dtypes.float8_e4m3fnuz, 8),
    "F8_E5M2FNUZ": (ml_dtypes.float8_e5m2fnuz, 8),
    "BF16": (ml_dtypes.bfloat16, 16),
    "F16": (np.float16, 16),
    "F32": (np.float32, 32),
    "F64": (np.float64, 64),
    "C64": (np.complex64, 64),
    "I8": (np.int8, 8),
    "I16": (np.int16, 16),
    "I32": (np.int32, 32),
    "I64": (np.int64, 64),
    "U8": (np.uint8, 8),
    "U16": (np.uint16, 16),
    "U32": (np.uint32, 32),
    "U64": (np.uint64, 64),
    "BOOL": (np.bool_, 8),
}
BITS = {**{name: bits for name, (_, bits) in VIEWS.items()}, "F6_E2M3": 6, "F6_E3M2": 6}
SAVED_BY_SAFETENSORS = [name for name in VIEWS if name not in {"F4", "C64"}]


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def container(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file of that header (bytes, or what json can write) and data; `length` in place of the true one."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def written(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None = None, pad: int = 0) -> bytes:
    """A valid file: name -> (dtype, shape), bytes counting up through the data, the header padded with `pad` spaces."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = entry(dtype, shape, begin, end)
    return container(json.dumps(header).encode() + b" " * pad, bytes(i % 251 for i in range(end)))


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def index(folder: Path, weight_map: Any, name: str = "model.safetensors.index.json") -> Path:
    return put(folder / name, json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode())


def shards(folder: Path, count: int = 2, each: int = 2) -> dict[str, str]:
    """Shards of `each` U8 tensors [3] in the folder; the weight map of them."""
    folder.mkdir(exist_ok=True)
    weight_map = {}
    for i in range(count):
        name = f"model-{i + 1:05}-of-{count:05}.safetensors"
        names = [f"layers.{i}.{j}.weight" for j in range(each)]
        put(folder / name, written({n: ("U8", [3]) for n in names}))
        weight_map |= dict.fromkeys(names, name)
    return weight_map


def refused(path: Path, *words: str) -> str:
    """Opening must fail with a CheckpointError that has all of these words; the message."""
    with pytest.raises(CheckpointError) as caught:
        file.open(path)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert len(message) < 3000
    return message


# Round trips


@pytest.mark.parametrize("dtype", VIEWS)
@pytest.mark.parametrize("shape", [[], [1], [2, 4], [3, 2, 8], [0], [5, 0, 2], [1] * 63 + [2]], ids=str)
@pytest.mark.parametrize("pad", [0, 1], ids=["even", "odd"])
def test_every_dtype_and_shape(tmp_path: Path, dtype: str, shape: list[int], pad: int) -> None:
    if dtype == "F4" and math.prod(shape) % 2:
        shape = [*shape, 2]
    path = put(tmp_path / "a.safetensors", written({"first": ("U8", [1]), "w": (dtype, shape)}, pad=pad))
    raw = path.read_bytes()
    view, bits = VIEWS[dtype]
    with file.open(path) as files:
        w = files["w"]
        nbytes = math.prod(shape) * bits // 8
        assert (w.name, w.dtype, w.shape, w.file, w.nbytes) == ("w", dtype, tuple(shape), path, nbytes)
        got = w.array
        assert got.dtype == view
        assert got.shape == ((*shape[:-1], shape[-1] // 2) if dtype == "F4" else tuple(shape))
        assert not got.flags.writeable
        # tobytes, copies and casts must not mind that the address is a multiple of nothing
        assert got.tobytes() == raw[w.offset : w.offset + nbytes]
        assert got.copy().tobytes() == got.tobytes()
        np.testing.assert_array_equal(got.astype(np.complex128), got.copy().astype(np.complex128))


def test_f4_pairs_have_the_even_column_low(tmp_path: Path) -> None:
    path = put(tmp_path / "a.safetensors", container({"w": entry("F4", [2, 4], 0, 4)}, bytes([0x21, 0x43, 0x65, 0x87])))
    packed = file.open(path)["w"].array
    assert (packed & 15).tolist() == [[1, 3], [5, 7]] and (packed >> 4).tolist() == [[2, 4], [6, 8]]


def test_f4_rows_that_end_inside_a_byte_are_listed_only(tmp_path: Path) -> None:
    path = put(tmp_path / "a.safetensors", written({"w": ("F4", [2, 3])}))
    with file.open(path) as files:
        assert files["w"].nbytes == 3
        with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor 'w': F4 of shape \[2, 3\].*even"):
            _ = files["w"].array


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_f6_is_listed_and_has_no_array(tmp_path: Path, dtype: str) -> None:
    path = put(tmp_path / "a.safetensors", written({"w": (dtype, [2, 4]), "x": ("U8", [1])}))
    with file.open(path) as files:
        assert (files["w"].shape, files["w"].nbytes) == ((2, 4), 6)
        with pytest.raises(TypeError, match=rf"a\.safetensors: tensor 'w': {dtype} packs 6-bit elements.*F8_E4M3"):
            _ = files["w"].array
        assert files["x"].array.tolist() == [6]


@pytest.mark.parametrize("dtype", SAVED_BY_SAFETENSORS)
def test_files_that_safetensors_wrote(tmp_path: Path, dtype: str) -> None:
    save_file = pytest.importorskip("safetensors.numpy").save_file
    view = VIEWS[dtype][0]
    raw = np.arange(48, dtype=np.uint8).reshape(2, -1)
    raw = raw % 2 if dtype == "BOOL" else raw
    tensors = {"w": raw.view(view), "b": np.float64([1, 2, 3]), "none": np.zeros((0, 3), view)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    with file.open(tmp_path / "a.safetensors") as files:
        assert set(files) == set(tensors)
        assert files.metadata == {tmp_path / "a.safetensors": {"format": "pt"}}
        for name, want in tensors.items():
            got = files[name].array
            assert (files[name].dtype, got.dtype, got.shape) == (
                ("F64", np.float64, (3,)) if name == "b" else (dtype, np.dtype(view), want.shape)
            )
            assert got.tobytes() == want.tobytes()


def test_what_it_is_to_the_caller(tmp_path: Path) -> None:
    path = put(tmp_path / "a.safetensors", written({"b": ("U8", [1]), "a": ("F32", [2])}, {"format": "pt"}))
    files = file.open(str(path))
    assert isinstance(files, Files) and isinstance(files["a"], Stored)
    assert list(files) == ["b", "a"] and len(files) == 2 and "c" not in files and files.get("c") is None
    assert files.path == path and "2 tensors in 1 files" in repr(files)
    with pytest.raises(KeyError, match="c"):
        files["c"]
    with pytest.raises(AttributeError):
        files["a"].name = "c"  # type: ignore[misc]
    assert files["a"] == file.open(path)["a"] and len({files["a"], files["b"]}) == 2
    assert issubclass(CheckpointError, ValueError)
    with pytest.raises(ValueError, match="read-only"):
        files["a"].array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        files["a"].array.flags.writeable = True


@pytest.mark.parametrize("header", [b"{}", b'{"__metadata__":null}', b'{"__metadata__":{}} \n', b"  {}"])
def test_a_file_without_tensors(tmp_path: Path, header: bytes) -> None:
    files = file.open(put(tmp_path / "a.safetensors", container(header)))
    assert len(files) == 0 and list(files.metadata.values()) == [{}]


def test_a_tensor_over_2_gib(tmp_path: Path) -> None:
    size = 2**31 + 2**20
    tensors = {"small": entry("U8", [1], 0, 1), "big": entry("F8_E4M3", [2**11 + 1, 2**20], 1, 1 + size)}
    header = container({**tensors, "last": entry("U8", [4], 1 + size, 5 + size)})
    path = put(tmp_path / "a.safetensors", header)
    with path.open("r+b") as stream:  # sparse: the holes take no disk
        stream.truncate(len(header) + 5 + size)
        stream.seek(-5, os.SEEK_END)
        stream.write(b"\x38\1\2\3\4")
    assert path.stat().st_blocks * 512 < 2**20
    with file.open(path) as files:
        big = files["big"].array
        assert big.shape == (2**11 + 1, 2**20) and big.nbytes == size
        assert float(big[-1, -1]) == 1 and float(big[0, 0]) == 0
        assert files["last"].array.tolist() == [1, 2, 3, 4]


# Lazy, without a copy, and alive after close


def test_nothing_is_copied(tmp_path: Path) -> None:
    path = put(tmp_path / "a.safetensors", container({"w": entry("F32", [64, 2**18], 0, 2**26)}))
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + 2**26)
    tracemalloc.start()
    try:
        with file.open(path) as files:
            array = files["w"].array
            assert np.shares_memory(array, files["w"].array) and array.nbytes == 2**26
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**18
    assert float(array.sum()) == 0


def test_only_headers_are_read_each_once_and_maps_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index(tmp_path, shards(tmp_path, count=5))
    opened: list[str] = []
    mapped: list[str] = []
    path_open, make = Path.open, file.Map.of

    def counted(self: Path, *args: Any, **kwargs: Any) -> Any:
        opened.append(self.name)
        return path_open(self, *args, **kwargs)

    def counted_map(path: Path, stream: Any) -> file.Map:
        mapped.append(path.name)
        return make(path, stream)

    monkeypatch.setattr(Path, "open", counted)
    monkeypatch.setattr(file.Map, "of", counted_map)
    monkeypatch.setattr(builtins, "open", None)
    files = file.open(tmp_path)
    assert sorted(opened) == sorted(path.name for path in tmp_path.iterdir()) and not mapped
    for tensor in files.values():
        assert tensor.array.tolist() == tensor.array.tolist()
    assert len(mapped) == len(set(mapped)) == 5


def test_views_outlive_close(tmp_path: Path) -> None:
    path = put(tmp_path / "a.safetensors", written({"w": ("U8", [5000]), "x": ("U8", [1])}))
    with file.open(path) as files:
        stored, array = files["w"], files["w"].array
    files.close()
    path.unlink()
    del files
    assert array[-1] == 4999 % 251
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"a\.safetensors: tensor 'w': the file is closed"):
            _ = stored.array


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list its maps")
def test_the_map_goes_with_the_last_view(tmp_path: Path) -> None:
    path = put(tmp_path / "a.safetensors", written({"w": ("U8", [5000])}))
    files = file.open(path)
    array = files["w"].array[10:20]
    files.close()
    assert str(path) in Path("/proc/self/maps").read_text()
    del array
    assert str(path) not in Path("/proc/self/maps").read_text()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_stays_open_as_long_as_its_map_and_no_longer(tmp_path: Path) -> None:
    """Closed, dropped, or never mapped; and where an array was taken, with the last view of it."""
    index(tmp_path, shards(tmp_path, count=3))
    before = descriptors()
    for close in (True, False):
        files = file.open(tmp_path)
        assert descriptors() == before
        arrays = [tensor.array for tensor in files.values()]
        assert descriptors() > before
        if close:
            files.close()
        del files
        assert descriptors() > before
        kept = arrays.pop()[:1]
        del arrays
        assert descriptors() == before + 2  # the map's own, and the one to read by
        del kept
        assert descriptors() == before


def test_a_map_is_read_into_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = written({"w": ("U8", [5000])})
    path = put(tmp_path / "a.safetensors", content)
    preadv = os.preadv
    for most in (len(content), 700):  # a file system may give less at once
        monkeypatch.setattr(os, "preadv", lambda fd, to, at, most=most: preadv(fd, [to[0][:most]], at))
        with path.open("rb") as stream:
            mapped = file.Map.of(path, stream)
        for offset, size in ((0, 1), (1, len(content) - 1), (77, 3001), (len(content), 0)):
            buffer = np.full(size, 0xEE, np.uint8)
            mapped.read_into(buffer, offset)
            assert buffer.tobytes() == content[offset : offset + size]


@pytest.mark.parametrize("how", ["shorter", "unreadable"])
def test_a_map_whose_file_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    path = put(tmp_path / "a.safetensors", written({"w": ("U8", [5000])}))
    with path.open("rb") as stream:
        mapped = file.Map.of(path, stream)
    if how == "shorter":
        os.truncate(path, 1000)
        said = "the file ends at byte 1000, but 4000 bytes from byte 100 on were there"
    else:
        monkeypatch.setattr(os, "preadv", lambda *of: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        said = "byte 100 on: cannot be read: Input/output error"
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: {said}"):
        mapped.read_into(np.empty(4000, np.uint8), 100)


@pytest.mark.parametrize("how", ["shorter", "replaced", "gone"])
def test_a_file_that_changed_after_it_was_opened(tmp_path: Path, how: str) -> None:
    path = put(tmp_path / "a.safetensors", written({"w": ("U8", [5000])}))
    files = file.open(path)
    if how == "shorter":
        os.truncate(path, 100)
    else:
        path.unlink()
    if how == "replaced":
        put(path, written({"v": ("U8", [5000])}))
    word = "cannot be mapped" if how == "gone" else "has changed"
    with pytest.raises(CheckpointError, match=rf"a\.safetensors: tensor 'w': the file {word}"):
        _ = files["w"].array


def test_a_hundred_shards_open_in_a_few_milliseconds_each(tmp_path: Path) -> None:
    index(tmp_path, shards(tmp_path, count=100, each=50))
    best = math.inf
    for _ in range(3):
        start = time.process_time()
        files = file.open(tmp_path)
        best = min(best, time.process_time() - start)
    assert len(files) == 5000
    assert best < 0.4  # of the processor: 4 ms a shard


# Folders


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    weight_map = shards(tmp_path, count=3)
    path = index(tmp_path, dict(reversed(weight_map.items())))
    put(tmp_path / "consolidated.safetensors", b"not named by the index, so not read")
    for opened in (file.open(tmp_path), file.open(path)):
        assert {name: stored.file.name for name, stored in opened.items()} == weight_map
        assert list(opened) == list(weight_map) and len(opened.metadata) == 3
        assert all(stored.array.shape == (3,) for stored in opened.values())


def test_another_index_serves_if_it_is_the_only_one(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    index(tmp_path, weight_map, "diffusion_pytorch_model.safetensors.index.json")
    assert set(file.open(tmp_path)) == set(weight_map)
    index(tmp_path, weight_map, "other.safetensors.index.json")
    refused(tmp_path, "diffusion_pytorch_model.safetensors.index.json", "other.safetensors.index.json", "by its path")


@pytest.mark.parametrize("count", [1, 3])
def test_a_folder_without_an_index(tmp_path: Path, count: int) -> None:
    weight_map = shards(tmp_path, count=count)
    put(tmp_path / "._model.safetensors", b"a hidden file, such as macOS leaves")
    put(tmp_path / "config.json", b"{}")
    assert {name: stored.file.name for name, stored in file.open(tmp_path).items()} == weight_map


def cached(tmp_path: Path) -> tuple[Path, Path, dict[str, str]]:
    """A model as the hub's cache keeps it: its folder, the snapshot in it, the weight map."""
    root = tmp_path / "models--a--b"
    snapshot, blobs = root / "snapshots" / "0f1e", root / "blobs"
    for folder in (snapshot, blobs, root / "refs"):
        folder.mkdir(parents=True)
    put(root / "refs" / "main", b"0f1e\n")
    weight_map = shards(tmp_path / "made")
    index(tmp_path / "made", weight_map)
    for number, made in enumerate(sorted((tmp_path / "made").iterdir())):
        made.rename(blobs / f"{number:064x}")
        (snapshot / made.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    return root, snapshot, weight_map


def test_the_cache_of_the_hub(tmp_path: Path) -> None:
    root, snapshot, weight_map = cached(tmp_path)
    for path in (snapshot, root, snapshot / "model.safetensors.index.json"):
        files = file.open(path)
        assert {name: stored.file for name, stored in files.items()} == {n: snapshot / s for n, s in weight_map.items()}
        assert all(stored.array.tolist() is not None for stored in files.values())
    one = next(iter(weight_map.values()))
    assert set(file.open(snapshot / one)) == {n for n, s in weight_map.items() if s == one}
    assert len(file.open((snapshot / one).resolve())) == 2  # the blob itself, which has no suffix


def test_a_cache_without_its_snapshot(tmp_path: Path) -> None:
    root, snapshot, weight_map = cached(tmp_path)
    put(root / "refs" / "main", b"../../../etc")
    refused(root, "main", "'../../../etc'")
    (root / "refs" / "main").unlink()
    assert set(file.open(root)) == set(weight_map)
    (root / "snapshots" / "2d3c").mkdir()
    refused(root, "2 snapshots")
    put(root / "refs" / "main", b"2d3c")
    (root / "snapshots" / "2d3c" / "snapshots").symlink_to(root / "snapshots")
    refused(root, "2d3c", "holds neither *.safetensors nor model.safetensors.index.json")
    (snapshot / next(iter(weight_map.values()))).resolve().unlink()
    refused(snapshot, "model.safetensors.index.json: tensor 'layers.0.0.weight'", "No such file")


# What is refused: paths


def test_no_such_file(tmp_path: Path) -> None:
    refused(tmp_path / "a.safetensors", "a.safetensors", "No such file", "is needed")
    refused(tmp_path / "a\0b.safetensors", "null byte")
    refused(tmp_path / "a\udc80.safetensors", "\\udc80.safetensors").encode()
    refused(tmp_path, str(tmp_path), "holds neither *.safetensors nor model.safetensors.index.json")


def test_what_is_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")  # to open it would wait for ever
    refused(tmp_path / "a.safetensors", "a.safetensors: is not a regular file")
    refused(tmp_path, "a.safetensors: is not a regular file")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.safetensors").mkdir()
    refused(tmp_path / "b", "c.safetensors: is not a regular file")


def test_symlink_loops(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to("b.safetensors")
    (tmp_path / "b.safetensors").symlink_to("a.safetensors")
    refused(tmp_path / "a.safetensors", "a.safetensors: cannot be opened", "symbolic links")
    refused(tmp_path, "symbolic links")
    index(tmp_path, {"w": "a.safetensors"})
    refused(tmp_path, "index.json: tensor 'w': its shard 'a.safetensors' cannot be opened", "symbolic links")
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors.index.json").symlink_to("model.safetensors.index.json")
    refused(tmp_path, "model.safetensors.index.json: cannot be opened", "symbolic links")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    put(tmp_path / "a.safetensors", written({"w": ("U8", [1])})).chmod(0)
    refused(tmp_path, "a.safetensors: cannot be opened", "denied")


# What is refused: headers. name -> content, words of the message.

W = {"w": entry("U8", [2], 0, 2)}
BAD_FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["has 0 bytes", "8 bytes"]),
    "seven bytes": (b"\2\0\0\0\0\0\0", ["has 7 bytes"]),
    "length only": (struct.pack("<Q", 2), ["length is 2, but 0 bytes follow"]),
    "no header": (struct.pack("<Q", 0), ["not JSON"]),
    "truncated header": (container(W)[:20], ["but 12 bytes follow", "cut short"]),
    "length one too large": (container({}, length=3), ["length is 3, but 2 bytes follow"]),
    "length over the limit": (container({}, length=100_000_001), ["100000001", "at most 100000000 is allowed"]),
    "huge length": (container({}, length=2**64 - 1), [str(2**64 - 1), "at most 100000000"]),
    "zip": (b"PK\3\4" + bytes(100), []),
    "not UTF-8": (container(b'{"\xff":1}'), ["not JSON in UTF-8", "0xff"]),
    "UTF-16": (container('{"a":1}'.encode("utf-16")), ["not JSON in UTF-8"]),
    "byte order mark": (container(b"\xef\xbb\xbf{}"), ["not JSON in UTF-8"]),
    "half a surrogate pair": (container(b'{"\\ud800":{}}'), ["surrogates not allowed"]),
    "half a surrogate pair in metadata": (container(b'{"__metadata__":{"a":"\\udc00"}}'), ["surrogates not allowed"]),
    "not JSON": (container(b"{'a':1}"), ["not JSON"]),
    "JSON cut short": (container(b'{"w":{"dtype":"U8"'), ["not JSON"]),
    "after the JSON": (container(b"{}{}"), ["not JSON", "Extra data"]),
    "padded with zeros": (container(b"{}\0\0"), ["not JSON"]),
    "NaN": (container(b'{"w":NaN}'), ["NaN is no JSON"]),
    "list": (container([]), ["the header is []", "JSON object"]),
    "number": (container(b"7"), ["the header is 7", "JSON object"]),
    "null": (container(b"null"), ["the header is None"]),
    "deep lists": (container(b"[" * 1_000_000), ["nested too deeply"]),
    "deep objects": (container(b'{"a":' * 1_000_000), ["nested too deeply"]),
    "deep in an entry": (container(b'{"w":' + b"[" * 900 + b"]" * 900 + b"}"), ["'w'"]),
    "long integer": (container(b'{"w":' + b"9" * 1_000_000 + b"}"), ["an integer of 1000000 digits"]),
    "same name twice": (container(b'{"w":1,"v":2,"w":1}'), ["tensor 'w'", "twice"]),
    "same key twice": (container(b'{"w":{"dtype":"U8","dtype":"I8"}}'), ["tensor 'dtype'", "twice"]),
    "same metadata twice": (container(b'{"__metadata__":{"a":"1","a":"2"}}'), ["'a'", "twice"]),
    "metadata list": (container({"__metadata__": ["a"]}), ["__metadata__ is ['a']", "object of strings"]),
    "metadata number": (container({"__metadata__": {"a": 1}}), ["__metadata__ is {'a': 1}", "object of strings"]),
    "metadata null": (container({"__metadata__": {"a": None}}), ["object of strings"]),
    "entry list": (container({"w": [1]}), ["tensor 'w'", "its entry is [1]"]),
    "no dtype": (container({"w": {"shape": [], "data_offsets": [0, 0]}}), ["tensor 'w'", "no dtype"]),
    "no shape": (container({"w": {"dtype": "U8", "data_offsets": [0, 0]}}), ["tensor 'w'", "no shape"]),
    "no offsets": (container({"w": {"dtype": "U8", "shape": []}}), ["tensor 'w'", "no data_offsets"]),
    "unknown dtype": (container({"w": entry("F8_E3M4", [2], 0, 2)}, b"12"), ["'w'", "'F8_E3M4'", "known are F4,"]),
    "lower case": (container({"w": entry("u8", [2], 0, 2)}, b"12"), ["tensor 'w'", "'u8'"]),
    "dtype list": (container({"w": entry(["U8"], [2], 0, 2)}, b"12"), ["tensor 'w'", "['U8']"]),  # type: ignore
    "dtype null": (container({"w": entry(None, [2], 0, 2)}, b"12"), ["tensor 'w'", "None"]),  # type: ignore
    "shape number": (container({"w": entry("U8", 2, 0, 2)}, b"12"), ["tensor 'w'", "shape is 2"]),  # type: ignore
    "shape negative": (container({"w": entry("U8", [-1, -2], 0, 2)}, b"12"), ["'w'", "[-1, -2]", "non-negative"]),
    "shape bool": (container({"w": entry("U8", [2, True], 0, 2)}, b"12"), ["tensor 'w'", "[2, True]"]),
    "shape float": (container({"w": entry("U8", [2.0], 0, 2)}, b"12"), ["tensor 'w'", "[2.0]"]),
    "shape text": (container({"w": entry("U8", ["2"], 0, 2)}, b"12"), ["tensor 'w'", "['2']"]),
    "shape null": (container({"w": entry("U8", [None], 0, 2)}, b"12"), ["tensor 'w'", "[None]"]),
    "65 dimensions": (container({"w": entry("U8", [1] * 65, 0, 1)}, b"1"), ["tensor 'w'", "at most 64"]),
    "a million dimensions": (container({"w": entry("U8", [1] * 10**6, 0, 1)}, b"1"), ["tensor 'w'", "at most 64"]),
    "product over 2^63": (
        container({"w": entry("U8", [2**62, 4], 0, 0)}),
        ["'w'", "more than the 9223372036854775807"],
    ),
    "product wraps to 2": (container({"w": entry("U8", [2**63 + 1, 2], 0, 2)}, b"12"), ["tensor 'w'", "more than"]),
    "product over 2^63 beside 0": (container({"w": entry("U8", [2**62, 0, 4], 0, 0)}), ["tensor 'w'", "more than"]),
    "F4 over 2^63 beside 0": (container({"w": entry("F4", [2**63, 0], 0, 0)}), ["tensor 'w'", "more than"]),
    "F64 over 2^63": (container({"w": entry("F64", [2**60], 0, 0)}), ["tensor 'w'", "more than"]),
    "offsets number": (container({"w": {**W["w"], "data_offsets": 2}}, b"12"), ["tensor 'w'", "data_offsets are 2"]),
    "one offset": (container({"w": {**W["w"], "data_offsets": [2]}}, b"12"), ["tensor 'w'", "two integers"]),
    "three offsets": (container({"w": {**W["w"], "data_offsets": [0, 1, 2]}}, b"12"), ["tensor 'w'", "two integers"]),
    "offset bool": (container({"w": {**W["w"], "data_offsets": [False, 2]}}, b"12"), ["tensor 'w'", "[False, 2]"]),
    "offset float": (container({"w": {**W["w"], "data_offsets": [0, 2.0]}}, b"12"), ["tensor 'w'", "[0, 2.0]"]),
    "offset negative": (container({"w": entry("U8", [2], -2, 0)}, b"12"), ["tensor 'w'", "[-2, 0]"]),
    "offsets backwards": (container({"w": entry("U8", [2], 2, 0)}, b"12"), ["tensor 'w'", "in order"]),
    "offset outside": (container({"w": entry("U8", [3], 0, 3)}, b"12"), ["tensor 'w'", "[0, 3]", "2 bytes of data"]),
    "offsets far outside": (container({"w": entry("U8", [2], 2**63, 2**63 + 2)}, b"12"), ["tensor 'w'", "2 bytes"]),
    "size too small": (container({"w": entry("F32", [2], 0, 4)}, b"1234"), ["'w'", "F32 of shape [2] needs 8 bytes"]),
    "size too large": (container({"w": entry("U8", [2], 0, 4)}, b"1234"), ["'w'", "needs 2 bytes", "[0, 4] hold 4"]),
    "F4 ends in a byte": (container({"w": entry("F4", [3], 0, 2)}, b"12"), ["tensor 'w'", "1 bytes and 4 bits"]),
    "F4 scalar": (container({"w": entry("F4", [], 0, 1)}, b"1"), ["tensor 'w'", "0 bytes and 4 bits"]),
    "F6 ends in a byte": (container({"w": entry("F6_E2M3", [2], 0, 2)}, b"12"), ["tensor 'w'", "1 bytes and 4 bits"]),
    "overlap": (container({**W, "v": entry("U8", [2], 1, 3)}, b"123"), ["tensor 'v'", "overlaps", "at 2"]),
    "same place twice": (container({**W, "v": entry("U8", [2], 0, 2)}, b"12"), ["tensor 'w'", "overlaps"]),
    "empty inside another": (container({**W, "v": entry("U8", [0], 1, 1)}, b"12"), ["tensor 'v'", "overlaps"]),
    "hole": (container({**W, "v": entry("U8", [1], 3, 4)}, b"1234"), ["tensor 'v'", "hole", "at 2"]),
    "hole at the beginning": (container({"w": entry("U8", [1], 1, 2)}, b"12"), ["tensor 'w'", "hole", "at 0"]),
    "left over at the end": (container(W, b"123"), ["3 bytes of data", "end at 2", "left over"]),
    "data without tensors": (container({}, b"123"), ["3 bytes of data", "end at 0"]),
    "data cut short": (container(W, b"1"), ["tensor 'w'", "1 bytes of data"]),
    "long name": (container({"n" * 100_000: 1}), ["nnn...nnn"]),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_file(tmp_path: Path, what: str) -> None:
    content, words = BAD_FILES[what]
    refused(put(tmp_path / "bad.safetensors", content), "bad.safetensors: ", *words)
    index(tmp_path, {"w": "bad.safetensors"})
    refused(tmp_path, "bad.safetensors: ", *words)


def test_deep_json_in_a_program_that_raised_the_recursion_limit() -> None:
    """In a process of its own: what fails here is a crash."""
    code = r"""
import io, pathlib, struct, sys
from cufp8.checkpoint import CheckpointError, file
sys.setrecursionlimit(10**7)
def parse(text):
    return file.read_header(io.BytesIO(struct.pack("<Q", len(text)) + text), 8 + len(text), pathlib.Path("a"))
for text in (b"[" * 10**6, b'{"a":' * 10**6, b'{"\\"]":"]","b":' + b"[" * 10**6, b'{"\\\\"' + b'{"a":' * 10**6):
    try:
        parse(text)
    except CheckpointError as error:
        print(error)
print(parse(b'{"__metadata__":{"\\"[[":"' + b"[" * 5000 + b'\\\\"}}')[0].keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    *errors, keys = done.stdout.splitlines()
    assert errors == ["a: the header is JSON nested too deeply; a valid one has three levels"] * 4
    assert keys == """dict_keys(['"[['])"""


def test_huge_json(tmp_path: Path) -> None:
    """Megabytes of lists, of numbers and of names."""
    for text in (
        b"[" + b"[]," * 2_000_000 + b"[]]",
        b'{"w":{"dtype":"U8","data_offsets":[0,0],"shape":[' + b"1," * 2_000_000 + b"1]}}",
        b"{" + b",".join(b'"%d":0' % i for i in range(500_000)) + b"}",
    ):
        refused(put(tmp_path / "a.safetensors", container(text)), "a.safetensors")


def test_the_limits_themselves_are_allowed(tmp_path: Path) -> None:
    size = 100_000_000
    path = put(tmp_path / "a.safetensors", struct.pack("<Q", size) + b"{}".ljust(size))
    assert len(file.open(path)) == 0
    path = put(tmp_path / "a.safetensors", container({"w": entry("U8", [2**62, 0], 0, 0)}))
    assert file.open(path)["w"].array.shape == (2**62, 0)


def test_keys_that_are_not_known_are_left_out(tmp_path: Path) -> None:
    path = put(tmp_path / "a.safetensors", container({"w": {**W["w"], "note": 1.5}}, b"12"))
    assert bytes(file.open(path)["w"].array) == b"12"


# What is refused: indexes

BAD_SHARDS = [
    "../model.safetensors",
    "../../etc/passwd",
    "/etc/model.safetensors",
    "sub/model.safetensors",
    "sub\\model.safetensors",
    "..\\model.safetensors",
    "C:model.safetensors",
    "C:\\model.safetensors",
    "\\\\host\\share\\model.safetensors",
    "a.safetensors:stream",
    "a:b.safetensors",
    "..",
    ".",
    "",
    "model.bin",
    "a\0.safetensors",
    "a\n.safetensors",
    None,
    1,
    ["a.safetensors"],
    {},
]


@pytest.mark.parametrize("shard", BAD_SHARDS, ids=repr)
def test_shards_elsewhere(tmp_path: Path, shard: Any) -> None:
    folder = tmp_path / "folder"
    weight_map = shards(folder)
    put(tmp_path / "model.safetensors", written({"w": ("U8", [1])}))
    index(folder, {**weight_map, "w": shard})
    refused(folder, "model.safetensors.index.json: tensor 'w': its shard is", "plain file name")


BAD_INDEXES = {
    "empty": (b"", "not JSON"),
    "list": (b"[]", "the index is []"),
    "no map": (b'{"metadata":{}}', "weight_map is nothing"),
    "null": (b'{"weight_map":null}', "weight_map is None"),
    "list of names": (b'{"weight_map":["w"]}', "weight_map is ['w']"),
    "no names": (b'{"weight_map":{}}', "weight_map is {}"),
    "two files for a name": (b'{"weight_map":{"w":"a.safetensors","w":"b.safetensors"}}', "tensor 'w'"),
    "two maps": (b'{"weight_map":{"w":"a.safetensors"},"weight_map":{"w":"b.safetensors"}}', "'weight_map'"),
    "deep": (b'{"weight_map":' * 1_000_000, "nested too deeply"),
    "not UTF-8": (b'{"weight_map":{"\xff":"a.safetensors"}}', "not JSON in UTF-8"),
    "surrogate": (b'{"weight_map":{"w":"\\udc80.safetensors"}}', "surrogates not allowed"),
}


@pytest.mark.parametrize("what", BAD_INDEXES)
def test_bad_index(tmp_path: Path, what: str) -> None:
    content, words = BAD_INDEXES[what]
    for name in "ab":
        put(tmp_path / f"{name}.safetensors", written({"w": ("U8", [1])}))
    put(tmp_path / "model.safetensors.index.json", content)
    refused(tmp_path, "model.safetensors.index.json: ", words)


def test_an_index_that_is_too_long(tmp_path: Path) -> None:
    path = put(tmp_path / "model.safetensors.index.json", b"{}")
    os.truncate(path, 2**40)  # sparse; must not be read whole
    refused(tmp_path, "index.json: the index is longer than the 100000000 bytes")


def test_index_and_shards_that_disagree(tmp_path: Path) -> None:
    weight_map = shards(tmp_path)
    first, second = sorted(set(weight_map.values()))
    index(tmp_path, {**weight_map, "w": "model-3.safetensors"})
    refused(tmp_path, "index.json: tensor 'w': its shard 'model-3.safetensors' cannot be opened: No such file")
    index(tmp_path, {**weight_map, "w": first})
    refused(tmp_path, f"{first}: tensor 'w': is not in this file, where model.safetensors.index.json says it is")
    index(tmp_path, {name: shard for name, shard in weight_map.items() if name != "layers.1.0.weight"})
    refused(tmp_path, f"{second}: tensor 'layers.1.0.weight'", "model.safetensors.index.json does not name it")
    index(tmp_path, {**weight_map, "layers.1.0.weight": first})
    refused(tmp_path, f"{second}: tensor 'layers.1.0.weight'", f"places it in '{first}'")


def test_a_name_in_two_files(tmp_path: Path) -> None:
    for name in "ab":
        put(tmp_path / f"{name}.safetensors", written({"w": ("U8", [1])}))
    refused(tmp_path, "b.safetensors: tensor 'w': is in 'a.safetensors' too")
    index(tmp_path, {"w": "a.safetensors"})
    assert file.open(tmp_path)["w"].file.name == "a.safetensors"


# Fuzzing: success or CheckpointError, nothing else

SEEDS = (
    written({"w": ("U8", [2, 3]), "v": ("F4", [2, 2]), "s": ("F32", [])}, {"format": "pt"}, pad=3),
    written({"a.weight": ("F8_E4M3", [4, 2]), "a.weight_scale": ("BF16", [1]), "none": ("F16", [0, 4])}),
    container({}),
)
TOKENS = [
    *(b'{ } [ ] : , " \\ - 0 1 e . true null NaN 1e999 {} [] "" "U8" "F4" "F64" "BOOL" \\ud800 \\u0000 \xff'.split()),
    *(b'"dtype" "shape" "data_offsets" "__metadata__" "w" -1 2 64 4294967296 9223372036854775808 [0,0] [0,1]'.split()),
    *(b" ", b"\0", b"[[[[[[", b'{"w":', b"1" * 30, b'{"__metadata__":{"a":1}}', b"[1,1,1,1,1,1,1]"),
]
PATH = Path("fuzz.safetensors")


def mutated(rng: np.random.Generator) -> bytes:
    """A seed with some bytes changed, cut, repeated, or replaced by a token; its length mostly made to fit again."""
    draws = rng.integers(0, 2**31, 24).tolist()
    content = bytearray(SEEDS[draws[0] % len(SEEDS)])
    header = struct.unpack_from("<Q", content)[0]
    data = content[8 + header :]
    text = content[8 : 8 + header]
    for i in range(1 + draws[1] % 4):
        kind, at, size, token = draws[2 + 4 * i : 6 + 4 * i]
        at %= len(text) + 1
        if kind % 6 == 0:
            text[at : at + 1] = bytes([token % 256])
        elif kind % 6 == 1:
            del text[at : at + 1 + size % 8]
        elif kind % 6 == 2:
            text[at:at] = text[size % (len(text) + 1) :][: token % 40]
        elif kind % 6 == 3:
            text[at:at] = TOKENS[token % len(TOKENS)]
        elif kind % 6 == 4:
            text[at : at + 1 + size % 6] = TOKENS[token % len(TOKENS)]
        else:  # a digit, so that many stay JSON
            digits = [i for i, byte in enumerate(text) if 48 <= byte < 58]
            if digits:
                text[digits[at % len(digits)]] = 48 + token % 10
    length = len(text) if draws[20] % 8 else draws[21] >> draws[22] % 32
    if draws[23] % 16 == 0:
        data = data[: draws[21] % (len(data) + 1)]
    return struct.pack("<Q", length) + bytes(text) + bytes(data)


def parsed(content: bytes) -> list[tuple[Any, ...]] | str:
    """What the parser finds, or its message; any other exception is the test's failure."""
    try:
        metadata, entries = file.read_header(io.BytesIO(content), len(content), PATH)
    except CheckpointError as error:
        message = str(error)
        assert message.startswith("fuzz.safetensors: ") and len(message) < 3000
        return message
    assert all(type(key) is type(value) is str for key, value in metadata.items())
    end = 8 + int.from_bytes(content[:8], "little")
    for _, dtype, shape, offset, nbytes in entries:
        assert offset == end and nbytes * 8 == math.prod(shape) * BITS[dtype]
        end += nbytes
    assert end == len(content)
    return entries


def test_fuzz_a_hundred_thousand_mutations() -> None:
    """Seeded, so a failure can be repeated: case i is `mutated(default_rng([6, i // 1000]))`, the i % 1000-th."""
    valid = cases = 0
    start = time.process_time()
    for block in range(100):
        rng = np.random.default_rng([6, block])
        for _ in range(1000):
            cases += 1
            valid += not isinstance(parsed(mutated(rng)), str)
    assert cases == 100_000
    assert 2_000 < valid < 98_000  # both sides of every check are reached
    assert time.process_time() - start < 40


def test_fuzz_random_bytes() -> None:
    rng = np.random.default_rng(66)
    for size in rng.integers(0, 64, 10_000):
        content = rng.bytes(int(size))
        parsed(content)
        parsed(struct.pack("<Q", len(content)) + content)


def test_fuzz_agrees_with_safetensors() -> None:
    """What we accept safetensors accepts, as the same tensors; what we refuse it refuses, but for the rules named."""
    safetensors = pytest.importorskip("safetensors")
    rng = np.random.default_rng(666)
    both = 0
    for _ in range(20_000):
        content = mutated(rng)
        ours = parsed(content)
        try:
            theirs = safetensors.deserialize(content)
        except safetensors.SafetensorError as error:
            assert isinstance(ours, str), (content, ours, error)
            continue
        if isinstance(ours, str):
            assert "twice" in ours or "at most 64" in ours or "digits" in ours, (content, ours)
            continue
        both += 1
        found = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in theirs}
        assert found == {n: (d, s, content[o : o + b]) for n, d, s, o, b in ours}, content
    assert both > 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(sorted(BITS)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w"]) | st.text(max_size=4)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(sorted(BITS)) | JSON,
        "shape": st.lists(st.integers(0, 4), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(0, 16), st.integers(0, 16)) | JSON,
    }
)


@settings(max_examples=500, deadline=None)
@given(
    header=st.dictionaries(KEYS, ENTRIES | JSON, max_size=4) | JSON | st.binary(),
    data=st.binary(max_size=16),
    length=st.none() | st.integers(0, 2**64 - 1),
)
def test_fuzz_any_json(header: Any, data: bytes, length: int | None) -> None:
    parsed(container(header, data, length))


@settings(max_examples=100, deadline=None)
@given(places=st.dictionaries(st.text(max_size=8), JSON, max_size=3) | JSON)
def test_fuzz_any_index(tmp_path_factory: pytest.TempPathFactory, places: Any) -> None:
    folder = tmp_path_factory.mktemp("index", numbered=True)
    index(folder, places)
    refused(folder)
