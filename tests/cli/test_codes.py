from __future__ import annotations

import io

import numpy as np
import pytest
from safetensors.numpy import save

from sottovoce.cli.codes import codec_digest, pack_codes, unpack_codes
from sottovoce.types import InputError

CODES = np.arange(48).reshape(3, 16) * 43 % 2048


def test_codes_and_what_is_known_of_them_survive():
    data = pack_codes(CODES, {"source": "ann é.wav", "codec": "0123"})
    codes, about = unpack_codes(data, "x")
    assert codes.dtype == np.int64 and (codes == CODES).all()
    assert about["source"] == "ann é.wav" and about["format"] == "sottovoce-codes"


def test_codes_in_any_order_of_memory_survive():
    codes, _ = unpack_codes(pack_codes(np.asfortranarray(CODES), {}), "x")
    assert (codes == CODES).all()


def test_a_numpy_file_has_codes_only():
    buffer = io.BytesIO()
    np.save(buffer, CODES)
    codes, about = unpack_codes(buffer.getvalue(), "x")
    assert (codes == CODES).all() and about == {}


def _numpy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"RIFF....WAVE",
        pack_codes(CODES, {})[:-5],
        save({"other": CODES}),
        _numpy(CODES)[:100],
        _numpy(CODES.astype(np.float32)),
        _numpy(CODES[0]),
        _numpy(np.array([{"a": 1}])),
    ],
)
def test_anything_else_is_refused_by_name(data):
    with pytest.raises(InputError, match="bad file") as refused:
        unpack_codes(data, "bad file")
    assert refused.value.field == "codes"


def test_a_digest_tells_codecs_apart(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"a" * 100)
    other.write_bytes(b"a" * 99 + b"b")
    assert len(codec_digest(one)) == 16 and codec_digest(one) != codec_digest(other)
