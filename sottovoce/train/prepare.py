"""Recordings with texts -> a prepared training set: checked, encoded, with a speaker vector each. Goes on where it was.

The lines are worked through in portions, one shard each. A shard remembers what it was made from; one that is there
already, from the same lines and recordings by the same codec, is left as it is. Knows nothing of training.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sottovoce.codec.codec import Codec
from sottovoce.config import ModelConfig
from sottovoce.model.speaker import SpeakerEncoder, speaker_vector
from sottovoce.model.weights import load_codec
from sottovoce.train.clips import MAX_S, Dropped, Line, checked_line, read_clip, read_lines, reason_of
from sottovoce.train.export import load_speaker_encoder
from sottovoce.train.shards import MANIFEST, ClipInfo, shard_about, write_manifest, write_shard
from sottovoce.types import FRAME_SAMPLES, SAMPLE_RATE, InputError, SottovoceError

SHARD_CLIPS = 256
BATCH_S = 120.0  # seconds of sound that are encoded together
PENDING_S = 1200.0  # that wait to be sorted by length: 115 MB
READERS = 4  # threads that read recordings ahead
MIN_AHEAD, AHEAD_A_SECOND = 64, 0.1  # recordings that are read ahead, of each second that waits

# A line, its codes, the codes of its reference and its speaker vector, where there are such.
_Done = tuple[Line, np.ndarray, np.ndarray | None, np.ndarray | None]


@dataclass(frozen=True)
class Report:
    """What came of it. `dropped` in the order of the lines."""

    folder: Path
    num_clips: int
    audio_s: float
    dropped: tuple[Dropped, ...]
    num_reused_shards: int


class Preparer:
    """Encoders of one checkpoint, loaded once.

    Args:
        model: folder of a checkpoint. A Base model, or a fine-tune of one, also gives speaker vectors.
        device: where the encoders go.
        max_s: longer clips are dropped.
        pending_s: seconds of sound that are in memory at once. Clips of equal length among them are encoded together,
            so that more keep a fast GPU busier.
    """

    def __init__(
        self, model: Path, *, device: torch.device | str = "cpu", max_s: float = MAX_S, pending_s: float = PENDING_S
    ) -> None:
        self.model, self.max_s, self.pending_s = model, max_s, pending_s
        self.config = ModelConfig.from_folder(model)
        self.digest = codec_digest(model)
        self.codec: Codec = load_codec(model, device=device, dtype=torch.float32, parts=("encoder",))
        self.codec.freeze_codebooks()
        self.speaker_encoder: SpeakerEncoder | None = load_speaker_encoder(model, device)
        self._references: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}

    def run(
        self,
        source: Path,
        out: Path,
        *,
        shard_clips: int = SHARD_CLIPS,
        on_progress: Callable[[int, float, Sequence[Dropped]], None] | None = None,
    ) -> Report:
        """Prepares `source` (see `clips.read_lines`) into folder `out`.

        Args:
            shard_clips: lines a shard.
            on_progress: is told after each shard: clips so far, seconds of sound so far, what the shard dropped.

        Raises:
            InputError: no such source, or not one clip in it that can be used.
        """
        out.mkdir(parents=True, exist_ok=True)
        (out / MANIFEST).unlink(missing_ok=True)
        shards, dropped, num_clips, audio_s, num_reused = [], [], 0, 0.0, 0
        for index, lines in enumerate(_portions(read_lines(source), shard_clips)):
            path, key = out / f"shard-{index:05d}.safetensors", self._key(lines)
            about = shard_about(path)
            if about.get("key") == key:
                num_reused += 1
            else:
                self._write(path, key, lines)
                about = shard_about(path)
            shards.append(path)
            clips = json.loads(about["clips"])
            num_clips += len(clips)
            audio_s += sum(clip["num_frames"] for clip in clips) * FRAME_SAMPLES / SAMPLE_RATE
            new = [Dropped(**item) for item in json.loads(about["dropped"])]
            dropped += new
            if on_progress is not None:
                on_progress(num_clips, audio_s, new)
        for path in set(out.glob("shard-*.safetensors")) - set(shards):  # of an earlier, longer source
            path.unlink()
        report = "".join(json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in dropped)
        (out / "dropped.jsonl").write_text(report, "utf-8")
        if not num_clips:
            first = f"; the first: line {dropped[0].number}: {dropped[0].reason}" if dropped else ""
            raise InputError(f"{source}: not one of {len(dropped)} clips can be used{first}", field="source")
        width = None if self.speaker_encoder is None else self.speaker_encoder.config.enc_dim
        about: dict[str, Any] = {"codec": self.digest, "model": self.model.name, "vector_width": width}
        about |= {"num_clips": num_clips, "audio_s": round(audio_s, 2), "num_dropped": len(dropped)}
        about["device"] = str(self.codec.encoder.device)
        write_manifest(out, about, shards)
        return Report(out, num_clips, audio_s, tuple(dropped), num_reused)

    def _key(self, lines: Sequence[Line | Dropped]) -> str:
        """Of everything that a shard depends on."""
        parts: list[object] = [self.digest, self.max_s, self.speaker_encoder is not None, self.model.name]
        for line in lines:
            parts.append(asdict(line))
            for path in (line.audio, getattr(line, "ref_audio", None)):
                stat = Path(path).stat() if path and Path(path).is_file() else None
                parts.append(stat and (stat.st_size, stat.st_mtime_ns))
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

    def _write(self, path: Path, key: str, lines: Sequence[Line | Dropped]) -> None:
        dropped, clips, pieces, vectors, first = [], [], [], [], 0
        for line, own, ref_codes, vector in self._work(lines, dropped):
            num_ref = 0 if ref_codes is None else len(ref_codes)
            clips.append(
                ClipInfo(
                    line.text, line.language or "auto", line.speaker, line.instruct, line.ref_text if num_ref else None,
                    line.audio, first, len(own), num_ref, len(clips),
                )
            )  # fmt: skip
            pieces += [own] if ref_codes is None else [own, ref_codes]
            vectors += [] if vector is None else [vector]
            first += len(own) + num_ref
        dropped.sort(key=lambda item: item.number)
        write_shard(path, key, clips, pieces, vectors, [asdict(item) for item in dropped])

    def _work(self, lines: Sequence[Line | Dropped], dropped: list[Dropped]) -> Iterator[_Done]:
        """Each line that can be used, with its codes, those of its reference, and its vector; others into `dropped`.
        Samples of no more than `pending_s` and some clips are in memory at once."""
        pending: list[tuple[Line, np.ndarray, tuple[np.ndarray | None, np.ndarray | None]]] = []

        def encoded() -> Iterator[_Done]:
            codes = self._encode([samples for _, samples, _ in pending])
            for (line, samples, (ref_codes, vector)), own in zip(pending, codes, strict=True):
                if vector is None and self.speaker_encoder is not None:
                    vector = speaker_vector(self.speaker_encoder, samples)
                yield line, own, ref_codes, vector
            pending.clear()

        num_samples = 0
        with ThreadPoolExecutor(READERS) as pool:
            for line, reading in _ahead(pool, self._read, lines, max(MIN_AHEAD, int(AHEAD_A_SECOND * self.pending_s))):
                if isinstance(line, Dropped):
                    dropped.append(line)
                    continue
                try:
                    checked, samples = reading.result()
                    pending.append((checked, samples, self._reference(checked)))
                    num_samples += len(samples)
                except (SottovoceError, OSError, RuntimeError) as error:
                    dropped.append(Dropped(line.number, line.audio, reason_of(error)))
                if num_samples > self.pending_s * SAMPLE_RATE:
                    yield from encoded()
                    num_samples = 0
        if pending:
            yield from encoded()

    def _read(self, line: Line | Dropped) -> tuple[Line, np.ndarray] | None:
        """The line as it is trained on, and its samples."""
        if isinstance(line, Dropped):
            return None
        return checked_line(line, self.config.languages), read_clip(line.audio, max_s=self.max_s)

    def _reference(self, line: Line) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Codes (where their words are known) and vector of the line's reference; each recording is looked at once."""
        if line.ref_audio is None:
            return None, None
        if line.ref_audio not in self._references:
            samples = read_clip(line.ref_audio, field="ref_audio", max_s=self.max_s)
            vector = None if self.speaker_encoder is None else speaker_vector(self.speaker_encoder, samples)
            self._references[line.ref_audio] = self._encode([samples])[0], vector
        codes, vector = self._references[line.ref_audio]
        return (codes if line.ref_text else None), vector

    def _encode(self, clips: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Codes int64 [T, K] of each clip. Clips of as many frames share a pass, each filled up with silence to whole
        frames, as it would be alone: company cannot change a code."""
        order = sorted(range(len(clips)), key=lambda index: len(clips[index]))
        codes: list[np.ndarray] = [np.zeros(0)] * len(clips)
        filled = [np.pad(clips[index], (0, -len(clips[index]) % FRAME_SAMPLES)) for index in order]
        longest = max(map(len, filled), default=1)
        max_rows = max(1, int(BATCH_S * SAMPLE_RATE / longest))
        for index, rows in zip(order, self.codec.encode(filled, max_rows=max_rows) if filled else [], strict=True):
            codes[index] = rows.T.cpu().numpy()
        return codes


def codec_digest(model: Path) -> str:
    """SHA-256 of the codec's weights file, the first 16 hexadecimal digits."""
    within = model / "speech_tokenizer" / "model.safetensors"
    with (within if within.exists() else model / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _ahead(
    pool: ThreadPoolExecutor, work: Callable[[Any], Any], items: Iterable[Any], count: int
) -> Iterator[tuple[Any, Future]]:
    """Each item and its work, of which no more than `count` are begun before they are asked for."""
    begun: deque[tuple[Any, Future]] = deque()
    for item in items:
        begun.append((item, pool.submit(work, item)))
        if len(begun) >= count:
            yield begun.popleft()
    yield from begun


def _portions(lines: Iterable[Line | Dropped], size: int) -> Iterator[list[Line | Dropped]]:
    lines = iter(lines)
    while portion := list(islice(lines, size)):
        yield portion
