"""CUDA C++ at run time: compiled by NVRTC, which CUDA builds of torch bring along, kept in the user's cache folder, and
launched on torch's current stream. Knows no kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch


class Unsupported(RuntimeError):
    """The kernel cannot run here; the message says why. The other kernels can."""


def launch(kernel: int, grid: int, threads: int, shared_bytes: int, values: Sequence[int]) -> None:
    """A cooperative launch: all blocks run at once. `values` are one struct of 64-bit numbers, the only argument."""
    driver = _driver()
    buffer = struct.pack(f"<{len(values)}q", *values)
    block = ctypes.create_string_buffer(buffer, len(buffer))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    sizes = (ctypes.c_uint(v) for v in (grid, 1, 1, threads, 1, 1, shared_bytes))
    _raise(driver, driver.cuLaunchCooperativeKernel(ctypes.c_void_p(kernel), *sizes, stream, parameters))


def open_kernel(image: bytes, name: str, device: torch.device) -> tuple[int, int]:
    """(function handle, bytes of dynamic shared memory, as the image's `shared_bytes` says) on `device`."""
    driver, module, function = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
    pointer, size, shared = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_uint()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # makes the context current
        _raise(driver, driver.cuModuleLoadData(ctypes.byref(module), image))
        _raise(driver, driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        symbol = b"shared_bytes"
        _raise(driver, driver.cuModuleGetGlobal_v2(ctypes.byref(pointer), ctypes.byref(size), module, symbol))
        _raise(driver, driver.cuMemcpyDtoH_v2(ctypes.byref(shared), pointer, ctypes.c_size_t(4)))
        _raise(driver, driver.cuFuncSetAttribute(function, 8, shared.value))  # MAX_DYNAMIC_SHARED_SIZE_BYTES
    return function.value, shared.value


def build(name: str, sources: Mapping[str, str], options: Sequence[str]) -> bytes:
    """Machine code, from the cache folder or from NVRTC.

    Args:
        name: of the file in the cache, before a digest of all that decides the code.
        sources: texts by file name, the last of them the one that includes the others.
    """
    key = hashlib.sha256(repr((dict(sources), list(options), torch.version.cuda)).encode()).hexdigest()[:24]
    place = _cache_folder() / f"{name}-{key}.cubin"
    if place.exists():
        return place.read_bytes()
    image = _compile(sources, options)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(f".{os.getpid()}")
        part.write_bytes(image)
        part.replace(place)
    except OSError:  # a folder that cannot be written costs a compilation each start
        pass
    return image


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sottovoce"


def _compile(sources: Mapping[str, str], options: Sequence[str]) -> bytes:
    library, program = _nvrtc(), ctypes.c_void_p()
    *headers, main = sources
    texts = (ctypes.c_char_p * len(headers))(*(sources[n].encode() for n in headers))
    names = (ctypes.c_char_p * len(headers))(*(n.encode() for n in headers))

    def check(code: int) -> None:
        if code:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise Unsupported(f"NVRTC: {library.nvrtcGetErrorString(code).decode()}{log()}")

    def log() -> str:
        size = ctypes.c_size_t()
        if not program or library.nvrtcGetProgramLogSize(program, ctypes.byref(size)):
            return ""
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, text)
        return "\n" + text.value.decode()[:4000]

    source = sources[main].encode()
    check(library.nvrtcCreateProgram(ctypes.byref(program), source, main.encode(), len(headers), texts, names))
    arguments = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    check(library.nvrtcCompileProgram(program, len(options), arguments))
    size = ctypes.c_size_t()
    check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    image = ctypes.create_string_buffer(size.value)
    check(library.nvrtcGetCUBIN(program, image))
    library.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw


@cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "0").split(".")[0]
    for name in (f"libnvrtc.so.{major}", "libnvrtc.so", f"nvrtc64_{major}0_0.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unsupported("NVRTC was not found; CUDA builds of torch bring it along: pip install nvidia-cuda-nvrtc")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


def _raise(driver: ctypes.CDLL, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA: {(text.value or b'unknown error').decode()}")
