"""Files of codes: one small safetensors file a recording, which says what it was made from and by which codec.

Knows no codec; it names one by the digest of its weights.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from sottovoce.types import InputError

ENDING = ".safetensors"
FORMAT = "sottovoce-codes"


def codec_digest(weights: Path) -> str:
    """SHA-256 of a weights file, the first 16 hexadecimal digits: enough to tell codecs apart."""
    with weights.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def pack_codes(codes: np.ndarray, about: Mapping[str, str]) -> bytes:
    """A file's bytes: `codes` int64 [T, K] stored as int16, `about` as metadata."""
    # safetensors writes memory as it lies, and codes come transposed from the codec.
    return save({"codes": np.ascontiguousarray(codes, np.int16)}, {"format": FORMAT, "version": "1", **about})


def unpack_codes(data: bytes, name: str) -> tuple[np.ndarray, dict[str, str]]:
    """Codes int64 [T, K] and metadata of a file's bytes: ours, or a plain .npy array (without metadata).

    Raises InputError, with `name` in it, for anything else.
    """
    try:
        if data.startswith(b"\x93NUMPY"):
            codes, about = np.load(io.BytesIO(data), allow_pickle=False), {}
        else:
            codes, about = load(data)["codes"], _metadata(data)
    except (SafetensorError, KeyError, ValueError, EOFError) as error:
        raise InputError(f"{name} is not a file of codes: {error}", field="codes") from error
    if codes.ndim != 2 or codes.dtype.kind not in "iu":
        raise InputError(
            f"{name} holds {codes.dtype} of shape {codes.shape}, not whole numbers of shape [frames, codebooks]",
            field="codes",
        )
    return codes.astype(np.int64), about


def _metadata(data: bytes) -> dict[str, str]:
    num_header = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + num_header]).get("__metadata__", {})
