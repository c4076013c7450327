"""The rows of KERNELS compiled for the archs of ARCHS, without a GPU, and what came out."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from cufp8 import runtime
from cufp8.formats import FLOATS
from cufp8.kernels import (
    ACTIVATION_ARGS,
    ARCHS,
    BLOCK_ARGS,
    KERNELS,
    LINEAR_ARGS,
    ROWS,
    SCALED_ARGS,
    SCALED_FORMATS,
    TENSOR_MAP_BYTES,
    TILE_ARGS,
    WEIGHTS,
    BlockProblem,
    Kernel,
    Problem,
    ScaledProblem,
    Target,
)

REGISTERS = 65_536  # of a multiprocessor, sm_75 to sm_121
STATIC_SMEM = 48 * 1024  # that a block may have without opting in
KIB = 1024
SMEM_BYTES = {  # that a block may have with opting in
    **dict.fromkeys(("sm_90a", "sm_100a", "sm_103a"), 227 * KIB),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120a", "sm_121a"), 99 * KIB),
    "sm_80": 163 * KIB,
    "sm_75": 64 * KIB,
}
FAST_MATH = (".ftz", "div.approx", "div.full", "rcp.approx", "sqrt.approx", "tf32")
FP8_CONVERSIONS = ("e4m3x2", "e5m2x2")  # from sm_89 on, of two numbers at once
NATIVE_BLOCKS = ("e2m1x2", "ue8m0x2", "kind::mxf", "tcgen05")  # from sm_100a on: no kernel uses them yet


@pytest.fixture(scope="session", autouse=True)
def nvrtc():
    """NVRTC's binding; without it there is nothing to test here."""
    try:
        runtime.nvrtc_version()
    except runtime.DeviceError as e:
        pytest.skip(str(e))
    from cupy.cuda import nvrtc

    return nvrtc


@dataclass(frozen=True)
class Entry:
    """One kernel of a binary: ptxas's account of it, and its PTX."""

    registers: int
    smem_bytes: int
    stack_bytes: int
    spilled_bytes: int
    threads: int  # its launch bound
    params: tuple[int, ...]  # bytes of each parameter
    ptx: str


def entries_of(log: str, ptx: str) -> dict[str, Entry]:
    """The kernels that a compilation tells of, by name."""
    bodies = {}
    for text in ptx.split(".entry ")[1:]:  # inline assembly has closing braces of its own
        bodies[re.match(r"\w+", text).group()] = text
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        name = re.match(r"'(\w+)'", part).group(1)
        stack, stores, loads = map(
            int,
            re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part).groups(),
        )
        smem = re.search(r"(\d+) bytes smem", part)
        header = bodies[name].split("{", 1)[0]
        found[name] = Entry(
            registers=int(re.search(r"Used (\d+) registers", part).group(1)),
            smem_bytes=int(smem.group(1)) if smem else 0,
            stack_bytes=stack,
            spilled_bytes=stores + loads,
            threads=int(re.search(r"\.maxntid (\d+)", header).group(1)),
            params=tuple(
                int(array or int(kind) // 8)
                for kind, array in re.findall(r"\.param [^,)]*?\.[bus](\d+) \w+_param_\d+(?:\[(\d+)\])?", header)
            ),
            ptx=bodies[name],
        )
    return found


def test_the_logs_reader_sees_a_spill() -> None:
    log = """ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    24 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 24 bytes cumulative stack size
ptxas info    : Compiling entry function 'g' for 'sm_90a'
ptxas info    : Function properties for g
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers
"""
    ptx = (
        ".visible .entry f(\n\t.param .align 8 .b8 f_param_0[88]\n)\n.maxntid 256\n{\n\tret;\n}\n"
        ".visible .entry g(\n\t.param .u64 g_param_0,\n\t.param .u32 g_param_1\n)\n"
        ".maxntid 64, 1, 1\n{\n\tadd.ftz.f32 a, b, c;\n}\n"
    )
    f, g = entries_of(log, ptx).values()
    assert (f.registers, f.smem_bytes, f.stack_bytes, f.spilled_bytes) == (40, 512, 24, 24)
    assert (f.threads, f.params) == (256, (88,))
    assert (g.registers, g.smem_bytes, g.spilled_bytes) == (8, 0, 0)
    assert (g.threads, g.params) == (64, (8, 4))
    assert ".ftz" in g.ptx and ".ftz" not in f.ptx


def build(row: Kernel, arch: str, nvrtc, monkeypatch: pytest.MonkeyPatch) -> tuple[runtime.Compiled, str]:
    """Compile as the package does; the PTX is read just before the program is destroyed."""
    taken = []
    destroy = nvrtc.destroyProgram

    def destroy_and_tell(program: int) -> None:
        taken.append(nvrtc.getPTX(program))
        destroy(program)

    monkeypatch.setattr(nvrtc, "destroyProgram", destroy_and_tell)
    compiled = runtime.compile(row, arch)
    (ptx,) = taken
    return compiled, ptx.decode() if isinstance(ptx, bytes) else ptx


def supported(nvrtc, arch: str) -> bool:
    return int(re.search(r"\d+", arch).group()) in nvrtc.getSupportedArchs()


def before_the_wait(lines: list[str]) -> set[int]:
    """The lines that can run before this thread's first griddepcontrol.wait, by the branches that lead to them."""
    labels: dict[str, list[int]] = defaultdict(list)
    for i, line in enumerate(lines):
        if found := re.match(r"\s*([$\w]+):\s*$", line):
            labels[found[1]].append(i)
    reached: set[int] = set()
    open_ends = [0]
    while open_ends:
        i = open_ends.pop()
        if i in reached or i >= len(lines) or "griddepcontrol.wait" in lines[i]:
            continue
        reached.add(i)
        found = re.match(r"\s*(@!?\S+\s+)?(bra|ret|exit|brx)\b(?:\.uni)?\s*([$\w]*)", lines[i])
        if found and found[2] == "brx":
            raise AssertionError(f"a branch that is not understood: {lines[i]}")
        if found and found[2] == "bra":  # labels of inline assembly repeat: theirs is the nearest before
            open_ends.append(max((at for at in labels[found[3]] if at < i), default=labels[found[3]][0]))
        if not found or found[1]:
            open_ends.append(i + 1)
    return reached


def test_the_reader_of_branches() -> None:
    ptx = """
        @%p1 bra $L__BB0_2;
        ld.one;
    again:
        @!done bra again;
        griddepcontrol.wait;
    $L__BB0_1:
        ld.two;
        ret;
    $L__BB0_2:
        ld.three;
    again:
        @!done bra again;
        @%p2 bra $L__BB0_1;
        bra.uni $L__BB0_4;
        ld.never;
    $L__BB0_4:
        griddepcontrol.wait;
        ld.late;
    """
    lines = ptx.splitlines()
    early = {lines[i].strip() for i in before_the_wait(lines) if "ld." in lines[i]}
    assert early == {"ld.one;", "ld.two;", "ld.three;"}


def arguments_behind(lines: list[str]) -> list[tuple[int, set[int]]]:
    """Each access to global memory, by its line, and the offsets in the argument block that its address comes from.

    Of a copy by a tensor map the address is the map's own, in the block.
    """
    made_of: dict[str, set[str | int]] = defaultdict(set)
    into_block: dict[str, int] = {}  # registers that point into the argument block
    accesses = []
    for at, line in enumerate(lines):
        found = re.match(r"\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*)\s+(.*);", line)
        if not found:
            continue
        op, operands = found.groups()
        if re.match(r"(ld|st|atom|red)\.(\w+\.)*?global|cp\.async\.(c[ag]|bulk)\.(?!commit|wait)", op):
            registers = re.findall(r"%rd\d+", " ".join(re.findall(r"\[.*?\]", operands)))
            accesses.append((at, [into_block.get(register, register) for register in registers]))
        target, _, rest = operands.partition("}" if operands.startswith("{") else ",")
        sources: set[str | int] = set(re.findall(r"%\w+", rest))
        registers = re.findall(r"%\w+", target)
        if op == "mov.b64" and "_param_0" in rest:
            into_block[registers[0]] = 0
        elif op == "add.s64" and (moved := re.fullmatch(r"\s*(%rd\d+), (-?\d+)", rest)) and moved[1] in into_block:
            into_block[registers[0]] = into_block[moved[1]] + int(moved[2])
        elif op == "cvta.param.u64" and rest.strip() in into_block:
            into_block[registers[0]] = into_block[rest.strip()]
        elif op.startswith("ld.param"):
            base, offset = re.search(r"\[([\w%]+)(?:\+(-?\d+))?\]", rest).groups()
            first, size = into_block.get(base, 0) + int(offset or 0), int(op[-2:]) // 8
            for i, register in enumerate(registers):
                made_of[register].add(first + i * size)
        else:
            for register in registers:
                made_of[register] |= sources

    def origins(registers: Iterable[str | int]) -> set[int]:
        seen: set[str | int] = set()
        open_ends: list[str | int] = list(registers)
        while open_ends:
            end = open_ends.pop()
            if end not in seen:
                seen.add(end)
                open_ends += made_of.get(end, ()) if isinstance(end, str) else ()
        return {end for end in seen if isinstance(end, int)}

    return [(at, origins(registers)) for at, registers in accesses]


X, CODES, SCALE, BIAS, Y = 0, 8, 16, 24, 32  # offsets in the argument block of linear kernels
X_MAP = TILE_ARGS.size - TENSOR_MAP_BYTES


def test_the_pointer_tracer_tells_x_from_codes() -> None:
    ptx = """
        ld.param.u64 %rd1, [f_param_0];
        mov.b64 %rd9, f_param_0;
        add.s64 %rd8, %rd9, 56;
        ld.param.u64 %rd2, [%rd8+-48];
        ld.param.v2.u64 {%rd3, %rd7}, [f_param_0+16];
        cvta.to.global.u64 %rd4, %rd1;
        mad.wide.s32 %rd5, %r7, 2, %rd4;
        @%p1 ld.global.u16 %rs1, [%rd5+4];
        ld.global.L1::no_allocate.v4.u32 {%r1, %r2, %r3, %r4}, [%rd2];
        cp.async.cg.shared.global [%r5], [%rd5], 16;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd3], %r6, [%r8];
        st.shared.f32 [%r9], %f1;
        @!%p2 st.global.f32 [%rd7], %f1;
        add.s64 %rd10, %rd9, 128;
        cvta.param.u64 %rd11, %rd10;
        cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r5], [%rd11, {%r6, %r7}], [%r8];
    """
    seen = [offsets for _, offsets in arguments_behind(ptx.splitlines())]
    assert seen == [{X}, {CODES}, {X}, {SCALE}, {BIAS}, {X_MAP}] and X_MAP == 128


def check_launch_order(arch: str, name: str, ptx: str) -> None:
    """Programmatic launch: before the wait only codes, scales and bias are touched, and only read."""
    if not ARCHS[arch].pdl:
        assert "griddepcontrol" not in ptx, name
        return
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx, name
    lines = ptx.splitlines()
    some = before_the_wait(lines)
    early = [(lines[at].strip(), offsets) for at, offsets in arguments_behind(lines) if at in some]
    assert any(CODES in offsets for _, offsets in early), f"{name} reads no codes before it waits"
    for line, offsets in early:
        assert offsets, f"{name}: where does the address of {line} come from?"
        assert not {X, Y, X_MAP} & offsets, f"{name} touches x or y before it waits: {line}"
        assert not re.match(r"(@\S+\s+)?(st|atom|red)\.", line), f"{name} writes before it waits: {line}"


WEIGHT = 8  # of rms_norm.cu: its offset in the argument block of activations.cuh


def check_activations(row: str, arch: str, name: str, ptx: str) -> None:
    """Before the wait at most the weight of rms_norm.cu is read, and where a kernel may start early it is."""
    assert not re.search(r"\bred\.|\batom\.(?!global\.max|max\.global)", ptx), f"{name}: atomics other than a maximum"
    assert ("atom." in ptx) == name.startswith("amax_"), name
    assert "ld.global.nc" not in ptx, (
        name
    )  # the compiler moves such loads behind the wait, and x may be written till then
    if not ARCHS[arch].pdl:
        assert "griddepcontrol" not in ptx, name
        return
    lines = ptx.splitlines()
    some = before_the_wait(lines)
    early = [(lines[at].strip(), offsets) for at, offsets in arguments_behind(lines) if at in some]
    assert all(offsets == {WEIGHT} and line.split()[-2:] and "ld.global" in line for line, offsets in early), (
        name,
        early,
    )
    kept = row == "rms_norm" and not name.endswith("_any") and "float32" not in name
    assert bool(early) == (kept and arch == "sm_90a"), name
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx, name


def check_conversions(arch: str, name: str, ptx: str, *formats: str) -> None:
    """From sm_89 on the hardware converts to or from these formats and no other; below it integer code does."""
    found = {word for word in FP8_CONVERSIONS if word in ptx}
    assert found == {f"{of}x2" for of in formats if ARCHS[arch].fp8}, f"{name}: {found}"


def check_blocks(arch: str, name: str, ptx: str) -> None:
    """Of quantize_blocks.cu: what may start early touches nothing before the wait."""
    assert "ld.global.nc" not in ptx, name
    entries = {"e4m3": "nvfp4|e4m3fn|_any$|^dequantize", "e5m2": "e5m2|_any$"}  # nvfp4: its scales; from e5m2: a shift
    converted = [of for of, names in entries.items() if re.search(names, name) and not name.startswith("amax")]
    check_conversions(arch, name, ptx, *converted)
    tells = name.startswith(("quantize", "amax")) and "nvfp4" not in name  # of values that are not finite
    assert bool(re.search(r"\b(atom|red)\.", ptx)) == tells, name
    if not ARCHS[arch].pdl or not name.startswith(("quantize", "values")):
        assert "griddepcontrol" not in ptx, name
        return
    lines = ptx.splitlines()
    assert not {at for at, _ in arguments_behind(lines)} & before_the_wait(lines), name
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx, name


def check_launches(row: Kernel, arch: str, found: dict[str, Entry]) -> None:
    """The table's launches have the block that the kernels are bound to, and memory for it."""
    smem_bytes = SMEM_BYTES[arch]
    target = Target(arch, 100, smem_bytes, False)
    problems: list[Problem | ScaledProblem | BlockProblem] = []
    weight = row.weight or "fp8"
    for m, k in itertools.product((1, 4, 8, 16, 32, 64, 128, 256, 300, 4096), (8, 4096, 4097)):
        problems += [
            Problem("scheme", (1, k), x, x, m, 2112, k, aligned16=k % 8 == 0, weight=weight, wide=wide)
            for x in FLOATS
            for wide in {False, WEIGHTS[weight].folds is not None}
        ]
        problems += [
            ScaledProblem(*dtypes, "bfloat16", m, 4096, k, fast_accum=fast, aligned16=k == 4096)
            for dtypes in SCALED_FORMATS
            for fast in (True, False)
        ]
        problems.append(BlockProblem("nvfp4", "mxfp8_e4m3fn", "bfloat16", m, 2112, k))
    for p in problems:
        if row.plan and row.entries(ARCHS[arch]) and row.takes is type(p) and row.serves(target, p):
            launch = row.plan(target, p)
            entry = found[launch.entry]
            # These have as many warps as k asks for.
            fewer = row.source in ("async_mma.cu", "scaled_async.cu") and launch.block < entry.threads
            assert entry.threads == launch.block or fewer, launch
            assert entry.smem_bytes + launch.smem_bytes <= smem_bytes, launch


def check_registers(name: str, entry: Entry) -> None:
    """Warps that ask for registers wait until others have given so many: there must be enough, or all wait for ever."""
    counts = re.findall(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32 (\d+)", entry.ptx)
    if not counts:
        return
    (more,), (fewer,) = ({int(n) for kind, n in counts if kind == which} for which in ("inc", "dec"))
    assert more % 8 == 0 and fewer % 8 == 0 and 24 <= fewer <= entry.registers <= more <= 255, name
    groups = entry.threads // 128
    assert entry.threads % 128 == 0 and groups == 3, name  # two warpgroups multiply, one copies
    assert (more * (groups - 1) + fewer) * 128 <= entry.registers * entry.threads, name


def check_instructions(row: Kernel, arch: str, name: str, ptx: str) -> None:
    """A linear kernel converts, multiplies and reads in the way that its arch asks for."""
    kind, weight = row.source.removesuffix(".cu"), WEIGHTS[row.weight]
    if weight.bits == 4:  # integer code converts, the scales of nvfp4 too
        check_conversions(arch, name, ptx)
    elif "_bfloat16_" not in name or kind == "gemv":  # else bfloat16 takes whichever way is measured to be faster
        check_conversions(arch, name, ptx, "e4m3")
    assert ("mma.sync" in ptx) == (kind in ("mma_sync", "async_mma", "bulk_mma")), name
    assert ("wgmma.mma_async" in ptx) == (kind == "wgmma"), name
    assert ("cp.async.bulk.tensor" in ptx) == (row.args is TILE_ARGS), name
    assert not re.search(r"\b(atom|red)\.", ptx), f"{name}: atomics"
    # Codes are asked for past L1. Nothing takes the read-only path: the compiler moves such loads
    # behind the wait for the kernel before, and x may still be written by that one.
    assert "ld.global.nc" not in ptx, name
    assert ("cp.async.ca" in ptx) == (kind == "async_mma" and weight.block > 0), name  # scales: less than 16 bytes
    assert "L1::no_allocate" in ptx or "cp.async.bulk" in ptx or "cp.async.cg" in ptx, name


A, B, SCALE_A, SCALE_B, SCALED_BIAS, SCALED_Y = range(0, 48, 8)  # offsets in the argument block of scaled.cuh
A_MAP, B_MAP = (SCALED_ARGS.size - i * TENSOR_MAP_BYTES for i in (3, 2))


def check_scaled(row: Kernel, arch: str, name: str, ptx: str) -> None:
    """A kernel of scaled.cuh multiplies codes as they are where the arch can, and reads at most b before it waits."""
    types = row.name.split("_")[-2:]
    if row.source in ("scaled_few.cu", "scaled_async.cu"):  # there b is the left operand
        types.reverse()
    codes = f"f32.{types[0]}.{types[1]}" in ptx
    if row.source in ("scaled_mma_sync.cu", "scaled_async.cu"):
        assert "wgmma" not in ptx and "mma.sync" in ptx, name
        widened = (9, 0) <= ARCHS[arch].cc < (12, 0)  # mma.sync of codes would do so itself there
        assert ("m16n8k32" in ptx) == codes == (ARCHS[arch].cc >= (8, 9) and not widened), name
        assert all((f"f16x2.{of}x2" in ptx) == widened for of in types), name
        assert ("cp.async.c" in ptx) == (ARCHS[arch].cc >= (8, 0)), name
    else:
        assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx and "cp.async.bulk.tensor" in ptx and codes, name
    assert not re.search(r"\b(atom|red)\.", ptx), f"{name}: atomics"
    assert "ld.global.nc" not in ptx, name
    if not ARCHS[arch].pdl:
        assert "griddepcontrol" not in ptx, name
        return
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx, name
    lines = ptx.splitlines()
    some = before_the_wait(lines)
    early = [(lines[at].strip(), offsets) for at, offsets in arguments_behind(lines) if at in some]
    for line, offsets in early:  # but for b into L2, and in earnest where the block says that it is a weight
        if row.source == "scaled_async.cu":
            assert ("cp.async.cg" in line or "prefetch" in line) and B in offsets, f"{name}: {line} before it waits"
            assert not offsets & {A, SCALE_A, SCALE_B, SCALED_BIAS, SCALED_Y}, f"{name}: {line} before it waits"
            continue
        assert offsets == {B_MAP}, f"{name}: {line} before it waits"
        assert "prefetch" in line or row.source == "scaled_few.cu", f"{name}: {line} before it waits"
    assert early or row.source in ("scaled_mma_sync.cu", "scaled_wgmma.cu"), f"{name} reads no b early"


def check_scaled_blocks(arch: str, name: str, ptx: str) -> None:
    """All that scaled_blocks.cu reads may be written by the kernel before: nothing is touched before the wait."""
    assert "mma.sync" in ptx and "ld.global.nc" not in ptx and not re.search(r"\b(atom|red)\.", ptx), name
    check_conversions(arch, name, ptx, "e4m3")  # codes and scales; from e5m2 it is a shift
    if not ARCHS[arch].pdl:
        assert "griddepcontrol" not in ptx, name
        return
    lines = ptx.splitlines()
    assert not {at for at, _ in arguments_behind(lines)} & before_the_wait(lines), name
    assert "griddepcontrol.wait" in ptx and "griddepcontrol.launch_dependents" in ptx, name


# Bytes that an entry spills, and its stack frame, where it does: to mend with the next change of its file.
SPILLS = {
    ("async_mma_mxfp8", "sm_100a", "async_mma_float16_8_2"): (48, 24),
    ("async_mma_mxfp8", "sm_120a", "async_mma_float16_8_2"): (32, 16),
}


# Archs for which most rows have the code of another: there a row is compiled if it has code of its own, or FP8 weights;
# and of each block format a cheap one.
NEIGHBOURS = {"sm_86": "sm_80", "sm_103a": "sm_100a", "sm_121a": "sm_120a"}


def decided(text: str, arch: str) -> list[bool]:
    """Which of a source's conditions on the arch hold for this one."""
    compared = r"__CUDA_ARCH__ [<>=]=? \d+"
    found = [c[0] for c in re.finditer(rf"{compared}(?: (?:&&|\|\|) {compared})*", text)]
    assert sum(c.count("__CUDA_ARCH__") for c in found) == text.count("__CUDA_ARCH__"), "a condition of another form"
    major, minor = ARCHS[arch].cc
    names = {"__CUDA_ARCH__": 100 * major + 10 * minor}
    return [eval(c.replace("&&", "and").replace("||", "or"), names) for c in found]


def is_compiled(row: Kernel, arch: str) -> bool:
    """Whether the tests compile that row for that arch, if it serves it."""
    if arch not in NEIGHBOURS or row.weight == "fp8" or row.source == "gemv.cu":
        return True
    text = b"".join(runtime.sources(row.source).values()).decode()
    return decided(text, arch) != decided(text, NEIGHBOURS[arch])


def test_code_of_one_arch_alone_is_seen() -> None:
    text = "#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900\n#elif __CUDA_ARCH__ >= 1030 && SOME\n"
    assert [decided(text, arch) for arch in ("sm_80", "sm_86", "sm_100a", "sm_103a")] == [
        [True, False],
        [False, False],
        [False, False],
        [False, True],
    ]
    own = {(row.source, arch) for row in KERNELS for arch in NEIGHBOURS if not row.weight and is_compiled(row, arch)}
    assert own == {(f"{name}.cu", "sm_86") for name in ("quantize", "activations", "rms_norm", "silu_mul")}


@pytest.mark.parametrize(
    ("row", "arch"),
    [(row.name, arch) for arch in ARCHS for row in KERNELS if row.entries(ARCHS[arch]) and is_compiled(row, arch)],
)
def test_row_compiles_clean(row: str, arch: str, nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    if not supported(nvrtc, arch):
        pytest.skip(f"NVRTC {runtime.nvrtc_version()} does not know {arch}")
    kernel = ROWS[row]
    compiled, ptx = build(kernel, arch, nvrtc, monkeypatch)
    assert "warning" not in compiled.log, compiled.log
    assert compiled.cubin[:4] == b"\x7fELF"
    assert re.search(r"^\.target (\w+)", ptx, re.M).group(1) == arch
    for word in FAST_MATH + NATIVE_BLOCKS + (() if ARCHS[arch].fp8 else FP8_CONVERSIONS):
        assert word not in ptx, f"{word} in the PTX: {re.findall(f'.*{re.escape(word)}.*', ptx)[:3]}"

    found = entries_of(compiled.log, ptx)
    # What the table says it launches is there, and nothing is there that it never launches.
    assert set(found) == set(kernel.entries(ARCHS[arch]))
    for name, entry in found.items():
        assert f".text.{name}\0".encode() in compiled.cubin, name
        spills, frame = SPILLS.get((row, arch, name), (0, 0))
        assert entry.spilled_bytes <= spills, f"{name} spills {entry.spilled_bytes} bytes"
        assert entry.stack_bytes <= frame, f"{name} has a stack frame of {entry.stack_bytes} bytes"
        assert entry.smem_bytes <= STATIC_SMEM, f"{name}: {entry.smem_bytes} bytes of shared memory"
        # Registers are given to warps in units of 256.
        warp = -(-entry.registers * 32 // 256) * 256
        assert warp * (entry.threads // 32) <= REGISTERS, f"{name}: {entry.registers} registers"
        # One argument block, which Launcher hands over as a whole.
        assert entry.params == (kernel.args.size,), f"{name} takes parameters of {entry.params}"
        if kernel.args is ACTIVATION_ARGS:
            check_activations(row, arch, name, entry.ptx)
        if kernel.args is BLOCK_ARGS:
            check_blocks(arch, name, entry.ptx)
        if kernel.takes is ScaledProblem:
            check_scaled(kernel, arch, name, entry.ptx)
        if kernel.takes is BlockProblem:
            check_scaled_blocks(arch, name, entry.ptx)
        if kernel.takes is Problem and kernel.plan is not None:
            check_instructions(kernel, arch, name, entry.ptx)
            check_launch_order(arch, name, entry.ptx)
        check_registers(name, entry)
    check_launches(kernel, arch, found)


def test_a_kernel_that_does_not_compile_says_why(nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "sources", lambda name: {name: b'extern "C" __global__ void f() { nonsense; }'})
    with pytest.raises(runtime.CompileError) as error:
        runtime.compile(ROWS["gemv"], "sm_80")
    text = str(error.value)
    for part in ("gemv.cu", "sm_80", "nonsense", "--gpu-architecture=sm_80", "-DWARPS="):
        assert part in text, text


def test_argument_blocks_of_another_size_do_not_compile(nvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses
    import struct

    for name in (
        "bulk_mma",
        "quantize",
        "activations",
        "quantize_blocks",
        "stream",
        "scaled_few_e4m3_e4m3",
        "scaled_blocks",
    ):  # each kind of block
        wrong = dataclasses.replace(ROWS[name], args=struct.Struct(ROWS[name].args.format + "P"))
        with pytest.raises(runtime.CompileError, match="must agree"):
            runtime.compile(wrong, "sm_90a")
    monkeypatch.setattr(runtime, "LINEAR_ARGS", struct.Struct(LINEAR_ARGS.format + "P"))
    for name in ("gemv", "mma_sync", "async_mma", "cublas", "layout", "bulk_mma"):  # what all linear kernels begin with
        with pytest.raises(runtime.CompileError, match="LinearArgs and kernels.LINEAR_ARGS must agree"):
            runtime.compile(ROWS[name], "sm_90a")


@pytest.mark.parametrize("source", sorted({row.source for row in KERNELS}))
def test_options(source: str) -> None:
    for row in KERNELS:
        if row.source == source:
            line = runtime.options(row, "sm_90a")
            assert "--gpu-architecture=sm_90a" in line
            assert f"-DARGS_BYTES={row.args.size}" in line and f"-DLINEAR_ARGS_BYTES={LINEAR_ARGS.size}" in line
            assert not any("ftz" in part or "fast" in part for part in line)
