"""Prepared training sets on disk: shards of codes and speaker vectors, and a manifest that names the codec.

A shard is a safetensors file: "codes" int16 [frames, K] of all its clips one after the other, "vectors" float32 [clips,
D] if the model that made them has a speaker encoder, and the texts as metadata. Knows neither recordings nor networks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from sottovoce.config import read_json
from sottovoce.types import CheckpointError, NotFoundError

MANIFEST = "manifest.json"
FORMAT, VERSION = "sottovoce-train", 1


@dataclass(frozen=True)
class ClipInfo:
    """A prepared clip without its codes: where they lie in shard `shard`. Reference frames, if any, follow its own."""

    text: str
    language: str
    speaker: str | None
    instruct: str | None
    ref_text: str | None
    audio: str
    first_frame: int
    num_frames: int
    num_ref_frames: int
    row: int
    shard: str = ""


def write_shard(
    path: Path,
    key: str,
    clips: Sequence[ClipInfo],
    codes: Sequence[np.ndarray],
    vectors: Sequence[np.ndarray],
    dropped: Sequence[dict[str, Any]],
) -> None:
    """Writes a shard in one go. `codes` int [T, K], in the order of their places; `key` says what it was made from."""
    joined = np.concatenate(codes) if codes else np.zeros((0, 1))
    # safetensors writes memory as it lies, and codes come transposed from the codec.
    tensors = {"codes": np.ascontiguousarray(joined, np.int16)}
    if vectors:
        tensors["vectors"] = np.stack(vectors).astype(np.float32)
    items = [{name: value for name, value in asdict(clip).items() if name != "shard"} for clip in clips]
    about = {"format": FORMAT, "version": str(VERSION), "key": key}
    about |= {"clips": json.dumps(items, ensure_ascii=False), "dropped": json.dumps(dropped, ensure_ascii=False)}
    partial = path.with_suffix(".partial")
    partial.write_bytes(save(tensors, about))
    os.replace(partial, path)


def shard_about(path: Path) -> dict[str, str]:
    """The metadata of a shard, {} for a file that is none."""
    try:
        with safe_open(str(path), framework="numpy") as file:
            return file.metadata() or {}
    except Exception:  # safetensors has no one class of error for what is not its own
        return {}


def write_manifest(folder: Path, about: dict[str, Any], shards: Sequence[Path]) -> None:
    """Says that the set is complete."""
    names = [path.name for path in shards]
    partial = folder / f"{MANIFEST}.partial"
    manifest = {"format": FORMAT, "version": VERSION, **about, "shards": names}
    partial.write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", "utf-8")
    os.replace(partial, folder / MANIFEST)


class Corpus:
    """A prepared training set. Codes are read from the files as they are asked for.

    Raises NotFoundError for a folder that is none, CheckpointError for one that is not whole.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise NotFoundError(
                f"{str(folder)!r} is no prepared training set; make one with `sottovoce train prepare`", field="data"
            )
        self.about = read_json(self.folder / MANIFEST)
        if (self.about.get("format"), self.about.get("version")) != (FORMAT, VERSION):
            raise CheckpointError(f"{self.folder / MANIFEST} is of another version; prepare the set again")
        self.clips: list[ClipInfo] = []
        for name in self.about["shards"]:
            about = shard_about(self.folder / name)
            if "clips" not in about:
                raise CheckpointError(f"{self.folder / name} is missing or damaged; prepare the set again")
            self.clips += [ClipInfo(**item, shard=name) for item in json.loads(about["clips"])]
        self._shard = cache(self._open)

    @property
    def codec(self) -> str:
        """Digest of the weights of the codec that made the codes."""
        return self.about["codec"]

    @property
    def has_vectors(self) -> bool:
        return self.about["vector_width"] is not None

    def codes(self, clip: ClipInfo) -> np.ndarray:
        """int64 [T, K] of what is to be spoken."""
        return self._frames(clip, clip.first_frame, clip.num_frames)

    def ref_codes(self, clip: ClipInfo) -> np.ndarray:
        """int64 [T, K] of the clip's reference recording, which may have no frames."""
        return self._frames(clip, clip.first_frame + clip.num_frames, clip.num_ref_frames)

    def vector(self, clip: ClipInfo) -> np.ndarray:
        """float32 [D] of the clip's reference, or of itself if it has none."""
        return self._shard(clip.shard).get_slice("vectors")[clip.row : clip.row + 1][0]

    def _frames(self, clip: ClipInfo, first: int, count: int) -> np.ndarray:
        rows = self._shard(clip.shard).get_slice("codes")
        if not count:  # safetensors refuses an empty slice at the end
            return np.zeros((0, rows.get_shape()[1]), np.int64)
        return rows[first : first + count].astype(np.int64)

    def _open(self, name: str) -> Any:
        return safe_open(str(self.folder / name), framework="numpy")
