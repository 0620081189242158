"""The kernel for Hopper is compiled, where Triton is there; a GPU is not needed for that. What it computes: tests/gpu."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vit_compile.attention import triton_kernel

triton = pytest.importorskip("triton")
varlen_gluon = pytest.importorskip("vit_compile.attention.varlen_gluon")


def compiled(dim: int, dtype: str) -> Any:
    """The kernel for capability 9.0."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    kernel = varlen_gluon._attention_kernel
    first, second = triton_kernel.parts_of(dim)
    constants: dict[str, Any] = {"DIM": dim, "D_1": first, "D_2": second, "SLOTS": triton_kernel.HOPPER_SLOTS, "VECTOR": 8}
    types = dict.fromkeys(kernel.arg_names, "i32") | {"cu_seqlens": "*i32", "scale": "fp32", "q": f"*{dtype}", "out": f"*{dtype}"}
    for name in ("k_tiles", "v_tiles"):
        for part, width in ((1, first), (2, second)):
            if width:
                layout = varlen_gluon.tile_layout(width, 3)
                types[f"{name}_{part}"] = f"tensordesc<{dtype}[1, {varlen_gluon.KEYS.value}, {width}],{layout!r}>"
            else:
                constants[f"{name}_{part}"] = None
    types |= dict.fromkeys(constants, "constexpr")
    places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
    aligned = {places[name]: [["tt.divisibility", 16]] for name in ("q", "out")}
    source = GluonASTSource(kernel, types, {places[name]: value for name, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.parametrize(("dim", "dtype"), [(16, "bf16"), (64, "bf16"), (72, "bf16"), (112, "fp16"), (128, "bf16")])
def test_it_compiles(dim: int, dtype: str) -> None:
    """Heads of one and of two parts fit into shared memory, and keys come by the tensor memory accelerator."""
    made = compiled(dim, dtype)
    assert made.metadata.shared <= 227 << 10
    ptx = made.asm["ptx"]
    assert "cp.async.bulk.tensor.3d" in ptx
    assert "wgmma.mma_async" in ptx
    assert not re.search(r"(ld|st)\.local", ptx)
