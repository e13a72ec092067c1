"""The kernels compile for cards that are not here, with the instructions that they are written for."""

import subprocess
import sys
from textwrap import dedent

import pytest

SCRIPT = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from sottovoce.kernels.triton_quant import gemm_kernel, gemv_kernel

def ptx(kernel, types, constants, warps, capability):
    constants |= {"PREFETCH": True, "PDL": capability >= 90}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    pointers = [name for name in signature if name.endswith("_ptr")]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in pointers}
    source = ASTSource(kernel, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    if capability >= 90:
        options["launch_pdl"] = True
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options).asm["ptx"]

for capability, is_int4 in ((90, True), (80, False)):
    n, k = 3072, 1024
    others = {"s_ptr": "*fp32", "extra_ptr": "*bf16", "out_ptr": "*bf16", "next_ptr": "*i8", "eps": "fp32", "B": "i32"}
    others |= {"out_stride": "i32", "next_bytes": "i32", "m_ptr": "*i8" if is_int4 else "*fp32", "step_ptr": "*fp32"}
    shared = {"N": n, "GROUPS": k // 128, "INT4": is_int4, "PAIR": True, "EPILOGUE": "none", "EVEN": True}
    words = k // (8 if is_int4 else 4)
    vector = {"x_ptr": "*bf16", "norm_ptr": "*bf16", "w_ptr": "*i32"} | others
    tile = {"K": k, "WORDS": words, "Q": words // 4, "NORM": True, "BN": 8, "DP4A": True}
    code = ptx(gemv_kernel, vector, shared | tile, 4, capability)
    print("dp4a" in code, "ld.global.v4.b32" in code, "griddepcontrol.wait" in code)
    matrix = {"q_ptr": "*i8", "w_ptr": "*u8" if is_int4 else "*i8"} | others
    tile = {"KP": k, "WIDTH": 4 * words, "BK": 64, "BN": 32, "STAGES": 3}
    for slices, rows in ((4, 16), (1, 64)):
        code = ptx(gemm_kernel, matrix, shared | tile | {"S": slices, "BB": rows}, 4, capability)
        print("wgmma" in code, "mma.sync.aligned.m16n8k32" in code)
"""


def test_instructions(monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # its kernels would not be compiled
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", dedent(SCRIPT)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 6
    for capability, vector, few, many in zip((90, 80), lines[::3], lines[1::3], lines[2::3], strict=True):
        assert vector == f"True True {capability >= 90}"
        assert few == "False True"  # slices of K, a warp each
        assert many == f"{capability >= 90} {capability < 90}"
