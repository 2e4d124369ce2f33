"""The CUDA kernels without a GPU: NVRTC compiles them, and g++ runs them against the float64 oracle."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, SHAPES, error, random_layers, tables, torch_epilogue
from kernel_host import HostKernels

from ridgefill import kernels, reference
from ridgefill.epilogue import EpilogueLayer, Place, dequantise_launch, synth_launch
from ridgefill.errors import KernelError

ARCHITECTURES = (75, 80, 86, 89, 90, 100)
# Run for every row of every prompt or calibration text; the rest runs once a fit.
HOT = ("synth_kv_", "dequantise_", "centre_rows_", "add_products")


# --- NVRTC ------------------------------------------------------------------------------------------------------------


def frame_bytes(cubin: bytes) -> dict[str, int]:
    """Local memory of each function of a cubin, in bytes: spilled registers and arrays that no register holds.

    From attribute FRAME_SIZE (0x11) of the section .nv.info: a symbol's index and its bytes.
    """
    offset, size, count, names = (
        struct.unpack_from("<Q", cubin, 0x28)[0],
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, offset + i * size) for i in range(count)]

    def text(start: int) -> str:
        return cubin[start : cubin.index(b"\0", start)].decode()

    (symbols,) = [h for h in headers if h[1] == 2]
    strings = headers[symbols[6]][4]
    (info,) = [h for h in headers if text(headers[names][4] + h[0]) == ".nv.info"]
    found, at = {}, info[4]
    while at < info[4] + info[5]:
        form, attribute, value = struct.unpack_from("<BBH", cubin, at)
        if form == 4 and attribute == 0x11:
            symbol, frame = struct.unpack_from("<II", cubin, at + 4)
            found[text(strings + struct.unpack_from("<I", cubin, symbols[4] + 24 * symbol)[0])] = frame
        at += 4 + (value if form == 4 else 0)
    return found


@pytest.mark.parametrize("file", kernels.KERNELS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_compiles_what_is_embedded_and_spills_nothing(file: str, architecture: int) -> None:
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(kernels.source(file), f"{file}.cu", [], [])
    try:
        nvrtc.compileProgram(program, [f"-arch=sm_{architecture}", *kernels.OPTIONS])
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert not nvrtc.getProgramLog(program).strip()  # no warning either
    frames = frame_bytes(nvrtc.getCUBIN(program))
    assert {name for name in frames if not name.startswith("$")} == set(kernels.KERNELS[file])
    assert not {name: size for name, size in frames.items() if name.startswith(HOT) and size}


def test_a_spill_would_be_seen() -> None:
    from cupy.cuda import nvrtc

    head = 'extern "C" __global__ void hungry(float* x, int n, int m) { float a[64];'
    body = "for (int i = 0; i < 64; ++i) a[i] = x[i] + i; a[n] = 1; a[m] += 2; x[0] = a[n + m]; }"
    program = nvrtc.createProgram(head + body, "hungry.cu", [], [])
    nvrtc.compileProgram(program, ["-arch=sm_80"])
    assert frame_bytes(nvrtc.getCUBIN(program)) == {"hungry": 256}


# --- synthesis --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape[:6])))
def test_keys_and_values_are_the_oracle_s(host: HostKernels, shape: Any, dtype: torch.dtype) -> None:
    batch, rows, heads, head_dim, rank, rotary_dim, options = shape
    layers, columns = random_layers(3, heads=heads, head_dim=head_dim, rank=rank, rotary_dim=rotary_dim, **options)
    z = torch.randn(batch, rows, columns).to(dtype)
    room = rows + 5
    places = []
    for index, _ in enumerate(layers):
        cos, sin = tables(1 if index == 1 else batch, rows, rotary_dim)
        keys, values = (torch.full((batch, heads, room, head_dim), torch.nan, dtype=dtype) for _ in range(2))
        scale = torch.rand(batch * rows) + 0.5 if index == 2 else None
        places.append(Place(keys, values, cos, sin, row_offset=3, scale=scale))
    host.run(synth_launch(z, layers, places))
    squares = torch.zeros(3, dtype=torch.float64)  # of the kernel's errors, torch's, and those of one rounding
    for layer, place in zip(layers, places, strict=True):
        oracle, rounded = reference.epilogue(z, layer, place), torch_epilogue(z, layer, place)
        for found, expected, in_dtype in zip((place.keys, place.values), oracle, rounded, strict=True):
            assert found[:, :, :3].isnan().all()
            assert found[:, :, 3 + rows :].isnan().all()
            written = found[:, :, 3 : 3 + rows]
            assert in_dtype.dtype == dtype
            assert error(written, expected) < 3 * torch.finfo(dtype).eps
            for index, other in enumerate((written, in_dtype, expected.to(dtype))):
                squares[index] += (other.double() - expected).square().sum()
    ours, torch_s, least = squares.sqrt().tolist()
    assert ours <= 2 * max(torch_s, least)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_paged_cache_gets_each_row_at_its_slot(host: HostKernels, dtype: torch.dtype) -> None:
    batch, rows, heads, head_dim, pages, page_rows = 2, 9, 2, 64, 5, 8
    layers, columns = random_layers(2, heads=heads, head_dim=head_dim, rank=8, rotary_dim=64)
    z = torch.randn(batch, rows, columns).to(dtype)
    slots = torch.randperm(pages * page_rows)[: batch * rows]
    slots[4] = -1
    places = []
    for _ in layers:
        # The layout of paged engines, [pages, page_rows, heads, dim], seen as [pages, heads, page_rows, dim].
        keys, values = (
            torch.full((pages, page_rows, heads, head_dim), torch.nan, dtype=dtype).transpose(1, 2) for _ in range(2)
        )
        cos, sin = tables(batch, rows, 64)
        places.append(Place(keys, values, cos, sin, slots=slots))
    host.run(synth_launch(z, layers, places))
    for layer, place in zip(layers, places, strict=True):
        for found, expected in zip((place.keys, place.values), reference.epilogue(z, layer, place), strict=True):
            by_slot = found.transpose(1, 2).flatten(0, 1)  # [slots, heads, dim]
            by_row = expected.transpose(1, 2).flatten(0, 1)  # [batch * rows, heads, dim]
            kept = slots >= 0
            assert error(by_slot[slots[kept]], by_row[kept]) < 3 * torch.finfo(dtype).eps
            assert int(by_slot.isnan().all(-1).all(-1).sum()) == pages * page_rows - int(kept.sum())


def test_threads_in_reverse_order_write_the_same(host: HostKernels, reversed_host: HostKernels) -> None:
    """What a missing barrier would change: a lane that reads before, or after, another has written."""
    found = []
    for server in (host, reversed_host):
        torch.manual_seed(1)
        layers, columns = random_layers(2, heads=3, head_dim=24, rank=5, rotary_dim=24)
        z = torch.randn(2, 9, columns)
        cos, sin = tables(2, 9, 24)
        places = [Place(torch.zeros(2, 3, 9, 24), torch.zeros(2, 3, 9, 24), cos, sin) for _ in layers]
        server.run(synth_launch(z, layers, places))
        found.append([tensor for place in places for tensor in (place.keys, place.values)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 21),
    heads=st.integers(1, 6),
    head_dim=st.sampled_from([2, 7, 8, 24, 40, 64]),
    extra=st.integers(0, 9),
    offset=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
)
def test_every_output_is_written_once(
    host: HostKernels, batch: int, rows: int, heads: int, head_dim: int, extra: int, offset: int, dtype: torch.dtype
) -> None:
    """Launch geometry: each element gets its own column's value, and all around it stays poisoned."""
    layer = EpilogueLayer(0, heads, head_dim, 0, 1.0, 1, 0.0)
    columns = 2 * heads * head_dim
    # Distinct, exact in every dtype, scale 1: an element written from elsewhere shows.
    numbers = torch.arange(batch * rows * columns).view(batch, rows, columns)
    z = torch.full((batch, rows, columns + extra), -7.0, dtype=dtype)[..., :columns]
    z.copy_(numbers % 251)
    keys, values = (torch.full((batch, heads, offset + rows + extra, head_dim), -1.0, dtype=dtype) for _ in range(2))
    host.run(synth_launch(z, [layer], [Place(keys, values, row_offset=offset)]))
    for found, first in ((keys, 0), (values, heads * head_dim)):
        expected = torch.full_like(found, -1.0)
        part = z[..., first : first + heads * head_dim].reshape(batch, rows, heads, head_dim)
        expected[:, :, offset : offset + rows] = part.transpose(1, 2)
        assert torch.equal(found, expected)


# --- int8 maps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_in", "n_out", "first", "width"), [(129, 48, 8, 40), (300, 41, 3, 17), (1, 8, 0, 8)])
def test_int8_tiles_are_exact(
    host: HostKernels, n_in: int, n_out: int, first: int, width: int, dtype: torch.dtype
) -> None:
    codes = torch.randint(-127, 128, (n_in, n_out), dtype=torch.int8)
    scales = (torch.rand(-(-n_in // 128), n_out) / 127).to(torch.bfloat16)
    out = torch.full((n_in, width), torch.nan, dtype=dtype)
    host.run(dequantise_launch(codes, scales, first, out))
    expected = codes.float() * scales.float().repeat_interleave(128, 0)[:n_in]
    assert torch.equal(out, expected[:, first : first + width].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_floats_round_as_torch_does(host: HostKernels, dtype: torch.dtype) -> None:
    """Ties, subnormal numbers, overflow: through the value path of a layer without a scale of its own."""
    scales = torch.tensor([1.0, 1.0 + 2**-8, 3 * 2.0**-9, 65519.0, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 1e-30])
    scales = torch.cat([scales, torch.rand(500) * 10.0 ** torch.randint(-9, 5, (500,))])
    z = torch.ones(1, len(scales), 4, dtype=dtype)
    keys, values = (torch.zeros(1, 1, len(scales), 2, dtype=dtype) for _ in range(2))
    host.run(synth_launch(z, [EpilogueLayer(0, 1, 2, 0, 1.0, 1, 0.0)], [Place(keys, values, scale=scales)]))
    assert torch.equal(values[0, 0, :, 0], scales.to(dtype))


# --- refusals ---------------------------------------------------------------------------------------------------------


def good() -> tuple[torch.Tensor, EpilogueLayer, Place]:
    z = torch.zeros(2, 3, 40)
    cos, sin = tables(2, 3, 8)
    return (
        z,
        EpilogueLayer(0, 2, 8, 8, 1.0, 8, 1e-6, rotary_dim=8),
        Place(torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8), cos, sin),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": torch.zeros(2, 3, 40, dtype=torch.float64)}, r"argument 'z' has dtype torch.float64, expected bfloat16"),
        ({"z": torch.zeros(2, 3, 80)[..., ::2]}, "argument 'z' has strides .* expected a dense last dimension"),
        ({"z": torch.zeros(3, 2, 40).transpose(0, 1)}, "argument 'z' has strides .* expected sequences that follow"),
        ({"z": torch.zeros(2, 3, 39)}, r"layers\[0\].column' is 0, expected 0 to -1"),
        ({"z": torch.zeros(2, 0, 40)}, "'rows' is 0, expected 1"),
        ({"head_dim": 513}, r"layers\[0\].head_dim' is 513, expected 1 to 512"),
        ({"rotary_dim": 7}, r"rotary_dim % 2' is 1"),
        ({"rotary_dim": 0}, r"layers\[0\].cos' is given, expected none"),
        ({"key_bias": torch.zeros(15)}, r"layers\[0\].key_bias' has shape \[15\], expected \[16\]"),
        ({"key_norm": torch.zeros(8).half()}, r"key_norm' has dtype torch.float16, expected torch.float32"),
        ({"cos": None}, r"layers\[0\].cos' is missing"),
        ({"sin": torch.zeros(2, 4, 8)}, r"layers\[0\].sin' has shape \[2, 4, 8\], expected \[2, 3, 8\]"),
        (
            {"keys": torch.zeros(2, 2, 3, 8).half()},
            r"layers\[0\].keys' has dtype torch.float16, expected torch.float32",
        ),
        ({"keys": torch.zeros(2, 2, 3, 8, device="meta")}, r"layers\[0\].keys' has device meta, expected cpu"),
        ({"values": torch.zeros(2, 3, 2, 8).transpose(1, 2)}, r"layers\[0\].values' has strides"),
        ({"row_offset": 1}, r"layers\[0\].row_offset' is 1, expected 0 to 0"),
        ({"slots": torch.zeros(6, dtype=torch.int32)}, r"slots' has dtype torch.int32, expected torch.int64"),
        ({"scale": torch.zeros(5)}, r"layers\[0\].scale' has shape \[5\], expected \[6\]"),
    ],
)
def test_what_a_kernel_would_misread_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    z, layer, place = good()
    synth_launch(z, [layer], [place])
    fields = {name: value for name, value in change.items() if name != "z"}
    with pytest.raises(KernelError, match=f"^synth_kv: .*{message}"):
        synth_launch(
            change.get("z", z),
            [replace(layer, **{n: v for n, v in fields.items() if n in vars(layer)})],
            [replace(place, **{n: v for n, v in fields.items() if n in vars(place)})],
        )


def test_misaligned_addresses_take_the_kernel_of_single_elements() -> None:
    z, layer, place = good()
    assert synth_launch(z, [layer], [place]).kernel == "synth_kv_f32"
    moved = torch.zeros(2 * 3 * 40 + 1)[1:].view(2, 3, 40)
    assert synth_launch(moved, [layer], [place]).kernel == "synth_kv_f32_any"
    assert synth_launch(z, [replace(layer, column=1, rank=7)], [place]).kernel == "synth_kv_f32_any"


def test_a_layer_s_columns_do_not_overlap_another_launch_s_grid() -> None:
    for rows, layers in itertools.product((1, 4, 5, 129), (1, 3)):
        z = torch.zeros(1, rows, 4 * layers)
        made = [EpilogueLayer(4 * i, 1, 2, 0, 1.0, 1, 0.0) for i in range(layers)]
        places = [Place(torch.zeros(1, 1, rows, 2), torch.zeros(1, 1, rows, 2)) for _ in made]
        launch = synth_launch(z, made, places)
        assert launch.grid == (-(-rows // 4), layers)
        assert launch.threads == 128


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KernelError, match="no kernel file 'scan'; known: gram, ridge_solve, synth_kv"):
        kernels.source("scan")
    with pytest.raises(KernelError, match=r"no kernel 'scan' in gram.cu; known: .*add_products"):
        kernels.Launch("gram", "scan", (1, 1), 32, ())
    with pytest.raises(KernelError, match=r"argument 'grid\.y' is 65536, expected 1 to 65535"):
        kernels.Launch("gram", "add_products", (1, 65536), 256, ())
    with pytest.raises(KernelError, match="unknown backend 'fast'; known: auto, torch, cuda"):
        kernels.choose_backend("fast", "cpu")
    with pytest.raises(KernelError, match="backend 'cuda' cannot run: the model is on cpu; kernels need an NVIDIA GPU"):
        kernels.choose_backend("cuda", "cpu")
    assert kernels.choose_backend("auto", "cpu") == ("torch", "the model is on cpu; kernels need an NVIDIA GPU")
    assert kernels.choose_backend("torch", "cpu") == ("torch", "backend='torch' was asked for")
