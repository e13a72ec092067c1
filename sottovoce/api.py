"""The front door: load a model, speak, stream, batch, close. The one place where the parts are wired together.

Everything heavy lies behind it: prompts (`model/prompt.py`), batching (`engine/`), samples (`codec/`). This file checks
what users give, cuts long texts, repeats runaways and puts the pieces together again.
"""

from __future__ import annotations

import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sottovoce import hub
from sottovoce.api_codec import Codec, decode_codes
from sottovoce.attempts import Attempt, about_item, joined, warn_of_transcript
from sottovoce.audio.io import AudioInput, read_audio
from sottovoce.audio.join import Joiner
from sottovoce.codec.codec import Codec as CodecModel
from sottovoce.codec.codec import DecodeMode
from sottovoce.codec.fast import SlotDecoder, slot_decoder
from sottovoce.engine.audio import AudioStage
from sottovoce.engine.driver import Driver, Handle
from sottovoce.engine.engine import Engine
from sottovoce.engine.request import Capacity
from sottovoce.kernels import select
from sottovoce.memory.probe import dtype_name, pick_device, pick_dtype
from sottovoce.model.prompt import PromptPlan, build_prompt
from sottovoce.model.speaker import SpeakerEncoder, speaker_vector
from sottovoce.model.weights import load_codec, load_network
from sottovoce.text.language import resolve_language
from sottovoce.text.segment import budget_frames, is_speakable, normalize_text, pause_after_s, split_text
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.types import (
    SAMPLE_RATE,
    AudioChunk,
    InputError,
    NotFoundError,
    Request,
    Sampling,
    SottovoceError,
    Speech,
    Usage,
    Voice,
    nearest,
    reject_unknown,
)

__all__ = ["TTS", "Codec"]

Notice = Callable[[str], None]

ROW_TOKENS = 1024  # KV positions a row gets on average: 80 s of speech; long requests take from the others
MIN_TOKENS = 10240  # one request must be able to run to the published budget of 8,192 frames


class TTS:
    """A loaded model. Safe to use from any number of threads; what they ask for is batched together.

    Use `from_pretrained`. Close it, or use it as a context manager, to get the memory back.
    """

    sample_rate = SAMPLE_RATE

    def __init__(
        self, folder: Path, *, device: torch.device, dtype: torch.dtype, max_rows: int, is_hub: bool, notice: Notice
    ):
        self.folder, self.device, self.dtype = folder, device, dtype
        self._notice = notice
        self._tokenizer = TextTokenizer.from_folder(folder, is_hub_snapshot=is_hub)
        parts = ("talker", "predictor", "text_embedding")
        network = load_network(folder, device=device, dtype=dtype, parts=parts)
        self.config = network.config
        codec_dtype = torch.float32 if device.type == "cpu" or dtype == torch.float16 else dtype
        ops = select(device, dtype)
        page_tokens = 16
        num_tokens = max(MIN_TOKENS, max_rows * ROW_TOKENS)
        capacity = Capacity(num_pages=num_tokens // page_tokens, max_rows=max_rows, page_tokens=page_tokens)
        if device.type == "cpu":
            # Nothing runs beside the host, so running ahead only wastes steps; and any batch size will do.
            capacity = replace(capacity, lag=0, buckets=tuple(range(1, max_rows)))
        max_positions = min(self.config.talker.max_position_embeddings, num_tokens)
        audio = self._audio_stage(codec_dtype, max_rows)
        self._driver = Driver(Engine(network, audio, ops, capacity, max_positions))
        self.backends: Mapping[str, str] = {
            "device": str(device),
            "dtype": dtype_name(dtype),
            "codec": dtype_name(codec_dtype),
            "kernels": ops.backend,
        }

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        offline: bool | None = None,
        device: str | None = None,
        dtype: str | None = None,
        max_rows: int | None = None,
        on_notice: Notice | None = None,
    ) -> TTS:
        """Loads a model.

        Args:
            model: folder, hub id, or short name ("1.7B-VoiceDesign"); None is the small demo model of the package.
            revision: branch, tag or commit of a hub id.
            offline: never touch the network; None follows the environment.
            device: "cuda", "cuda:1", "cpu"; None takes a GPU if there is one.
            dtype: "bfloat16", "float16", "float32"; None takes what suits the device.
            max_rows: how many requests run at the same time, more wait; None is 8 on a CPU and 16 on a GPU.
            on_notice: is given one-line notices, such as which model or voice was chosen; None prints to stderr.

        Raises:
            NotFoundError: no such model here, or no such device.
            CheckpointError: files that are incomplete or do not fit each other.
        """
        notice = on_notice or _to_stderr
        if model is None:
            notice("no model named: using the bundled demo model (random values: sound, not words)")
        folder = hub.resolve(model, revision=revision, offline=offline)
        chosen = pick_device(device)
        if max_rows is not None and max_rows < 1:
            raise InputError(f"max_rows must be at least 1, got {max_rows}", field="max_rows")
        rows = max_rows or (8 if chosen.type == "cpu" else 16)
        is_hub = model is not None and not Path(model).expanduser().is_dir()
        return cls(folder, device=chosen, dtype=pick_dtype(dtype, chosen), max_rows=rows, is_hub=is_hub, notice=notice)

    @property
    def kind(self) -> str:
        """voice_design, custom_voice or base."""
        return self.config.kind

    @property
    def speakers(self) -> list[str]:
        """Preset speakers, in the model's order."""
        return list(self.config.talker.spk_id)

    @property
    def languages(self) -> list[str]:
        return self.config.languages

    # -- speaking ------------------------------------------------------------------------------------------------

    def generate(self, text: str, *, split: bool = True, seed: int | None = None, **options: Any) -> Speech:
        """Speaks a text and waits for all of it.

        Args:
            text: any length; cut at sentences where it is long, all pieces in one voice and with one seed.
            split: False keeps the text in one piece whatever its length.
            seed: same seed, same speech, in any company; None draws one, which the result names.
            options: see `request`.

        Raises:
            InputError, NotFoundError: something in the request cannot be used; `field` names it.
            RunawayError: the speech did not end by itself, also not on other seeds.
        """
        requests = self._pieces(text, split, self.request(text, seed=seed, **options))
        return joined([request.text for request in requests], self._speak(requests, on_error="raise"))

    def stream(self, text: str, *, split: bool = True, seed: int | None = None, **options: Any) -> Iterator[AudioChunk]:
        """Speaks a text and gives its audio while it comes. Closing the iterator cancels the rest.

        The joined chunks are the samples that `generate` gives with the same seed. Audio that has left cannot be taken
        back: a runaway is not repeated, the last chunk's finish reason is then "length".
        """
        requests = self._pieces(text, split, self.request(text, seed=seed, **options))
        plans = [self._plan(request) for request in requests]  # errors now, not at the first chunk
        return self._stream(requests, plans)

    def batch(
        self,
        items: Sequence[str | Request | Mapping[str, Any]],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **defaults: Any,
    ) -> list[Speech | SottovoceError]:
        """Speaks many texts at once; results in the order of the items.

        Args:
            items: texts, requests, or mappings of "text" and options (see `request`) that override `defaults`.
            on_error: "return" puts the error in the place of its item; "raise" raises the first one, after all items
                have ended. The good items always finish.
        """
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error must be 'raise' or 'return', got {on_error!r}", field="on_error")
        requests: list[Request | SottovoceError] = []
        for item in items:
            try:
                requests.append(self._item(item, defaults))
            except SottovoceError as error:
                requests.append(error)
        good = [request for request in requests if isinstance(request, Request)]
        spoken = iter(self._speak(good, on_error="return"))
        results: list[Speech | SottovoceError] = []
        for index, request in enumerate(requests):
            result = next(spoken) if isinstance(request, Request) else request
            results.append(about_item(result, index) if isinstance(result, SottovoceError) else result)
        if on_error == "raise":
            for result in results:
                if isinstance(result, SottovoceError):
                    raise result
        return results

    def request(
        self,
        text: str,
        *,
        language: str = "auto",
        voice: Voice | str | Path | None = None,
        instruct: str | None = None,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_frames: int | None = None,
        is_streaming_text: bool | None = None,
        retries: int = 1,
        **unknown: Any,
    ) -> Request:
        """A checked Request from what users write.

        Args:
            text: what to say.
            language: name or code of a language of the model, or "auto".
            voice: a Voice, a preset speaker's name, or a voice file.
            instruct: how to say it, or what the voice is like.
            sampling: how codes are drawn; None is the published way.
            seed: overrides the sampling's seed.
            max_frames: the most frames of 80 ms for each piece; None allows generously for the text.
            is_streaming_text: see `types.Request`.
            retries: how often a runaway is repeated on another seed.
        """
        known = ["split", *(f.name for f in fields(Request)), "seed"]
        reject_unknown("option", unknown, known)
        sampling = sampling or Sampling()
        if seed is not None:
            sampling = sampling.with_(seed=seed)
        return Request(
            text=text,
            language=resolve_language(language, self.languages),
            voice=self.voice(voice),
            instruct=instruct,
            is_streaming_text=is_streaming_text,
            max_frames=max_frames,
            sampling=sampling,
            retries=retries,
        )

    # -- voices and codes ------------------------------------------------------------------------------------------

    def voice(self, voice: Voice | str | Path | None) -> Voice | None:
        """A Voice from a preset speaker's name or a voice file. None is the first preset speaker, with a notice."""
        if isinstance(voice, Voice):
            return voice
        if voice is None:
            if self.kind != "custom_voice" or not self.speakers:
                return None
            self._notice(f"no voice named: speaking as {self.speakers[0]!r} (speakers: {', '.join(self.speakers)})")
            return Voice(speaker=self.speakers[0])
        if str(voice).lower() in (name.lower() for name in self.speakers):
            return Voice(speaker=str(voice))
        if Path(voice).is_file() or Path(voice).suffix == ".safetensors":
            return Voice.load(voice)
        if not self.speakers:
            raise NotFoundError(
                f"no voice file {str(voice)!r}, and a {self.kind} model has no preset speakers", field="voice"
            )
        known = ", ".join(self.speakers)
        hint = nearest(str(voice).lower(), self.speakers)
        raise NotFoundError(f"no speaker or voice file {str(voice)!r}{hint}; speakers: {known}", field="voice")

    def make_voice(
        self,
        ref_audio: AudioInput,
        ref_text: str | None = None,
        *,
        language: str | None = None,
        consent: str | None = None,
        field: str = "ref_audio",
    ) -> Voice:
        """Makes a voice from a recording of a few seconds, once; save it, and no encoder is needed again. Base models.

        Args:
            ref_audio: a file, bytes, base64, or (samples, rate).
            ref_text: what is said in it, word for word: a closer clone. Without it only the speaker vector is used.
            language: spoken there.
            consent: a note on whose voice it is and that they agreed.
            field: how errors call the recording.
        """
        if self.kind != "base":
            raise InputError(f"making a voice from a recording needs a Base model; this is {self.kind}", field="model")
        samples = read_audio(ref_audio, sample_rate=SAMPLE_RATE, field=field)
        if ref_text is not None:
            ref_text = normalize_text(ref_text)
            if not is_speakable(ref_text):
                raise InputError("ref_text has no words; give the transcript, or leave it out", field="ref_text")
            warn_of_transcript(ref_text, len(samples) / SAMPLE_RATE)
        return Voice(
            x_vector=speaker_vector(self._speaker_encoder, samples),
            ref_codes=None if ref_text is None else self._encode(samples),
            ref_text=ref_text,
            language=language,
            consent=consent,
            model=self.folder.name,
        )

    def encode(self, audio: AudioInput, *, field: str = "audio") -> np.ndarray:
        """Codes int64 [T, 16] of a recording."""
        return self._encode(read_audio(audio, sample_rate=SAMPLE_RATE, field=field))

    def decode(self, codes: np.ndarray, *, mode: DecodeMode = "exact") -> np.ndarray:
        """Samples float32 [T * 1920] of codes [T, 16]; `mode` as in `codec.Codec.decode_stream`."""
        return decode_codes(self._codec, codes, mode)

    def close(self) -> None:
        """Finishes what is under way, refuses anything new, and gives all memory back."""
        driver = self.__dict__.get("_driver")
        if driver is None:
            return
        driver.close()
        for name in ("_driver", "_codec", "_speaker_encoder", "_encoder"):
            self.__dict__.pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __enter__(self) -> TTS:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _audio_stage(self, dtype: torch.dtype, max_slots: int) -> AudioStage:
        def decoder(dtype: torch.dtype) -> SlotDecoder:
            codec = load_codec(self.folder, device=self.device, dtype=dtype, parts=("decoder",))
            codec.freeze_codebooks()
            return slot_decoder(codec.decoder, max_slots)

        is_exact = dtype == torch.float32
        return AudioStage(decoder(dtype), None if is_exact else lambda: decoder(torch.float32))

    @cached_property
    def _codec(self) -> CodecModel:
        """For `decode`: the engine's decoder knows streams only."""
        codec = load_codec(self.folder, device=self.device, parts=("decoder",))
        codec.freeze_codebooks()
        return codec

    @cached_property
    def _encoder(self) -> CodecModel:
        codec = load_codec(self.folder, device=self.device, parts=("encoder",))
        codec.freeze_codebooks()
        return codec

    @cached_property
    def _speaker_encoder(self) -> SpeakerEncoder:
        return load_network(self.folder, device=self.device, parts=("speaker_encoder",)).speaker_encoder

    def _encode(self, samples: np.ndarray) -> np.ndarray:
        return self._encoder.encode([samples])[0].T.cpu().numpy()

    def _item(self, item: str | Request | Mapping[str, Any], defaults: Mapping[str, Any]) -> Request:
        if isinstance(item, Request):
            return item
        options = {**defaults, **({"text": item} if isinstance(item, str) else item)}
        if "text" not in options:
            raise InputError("an item needs a text", field="text")
        return self.request(**options)

    def _pieces(self, text: str, split: bool, request: Request) -> list[Request]:
        """One request a piece of the text, all with one seed, which is drawn here if none was given."""
        if request.sampling.seed is None:
            request = replace(request, sampling=request.sampling.with_(seed=secrets.randbits(62)))
        texts = split_text(text, request.language) if split else [text]
        return [replace(request, text=piece) for piece in texts or [text]]

    def _plan(self, request: Request) -> PromptPlan:
        if not is_speakable(request.text):
            raise InputError("text has nothing to say: no letter and no digit in it", field="text")
        return build_prompt(self.config, self._tokenizer, request)

    def _submit(self, request: Request, plan: PromptPlan, seed: int, ahead_s: float | None = None) -> Handle:
        max_frames = request.max_frames or budget_frames(request.text)
        return self._open_driver.submit(
            plan=plan, sampling=request.sampling, seed=seed, max_frames=max_frames, ahead_s=ahead_s
        )

    def _attempt(self, request: Request) -> Attempt:
        plan = self._plan(request)
        return Attempt(request, len(plan), lambda seed: self._submit(request, plan, seed), self.backends)

    @property
    def _open_driver(self) -> Driver:
        driver = self.__dict__.get("_driver")
        if driver is None:
            raise SottovoceError("this model is closed; load it again to go on")
        return driver

    def _speak(self, requests: Sequence[Request], on_error: str) -> list[Speech | SottovoceError]:
        """Speaks all, as many at once as fit twice over, so that rows never wait for prompts to be built."""
        results: list[Speech | SottovoceError | None] = [None] * len(requests)
        window = 2 * self._open_driver.engine.capacity.max_rows
        under_way: deque[tuple[int, Attempt]] = deque()
        coming = iter(enumerate(requests))
        while True:
            while len(under_way) < window and (entry := next(coming, None)) is not None:
                index, request = entry
                try:
                    under_way.append((index, self._attempt(request)))
                except SottovoceError as error:
                    results[index] = error
            if not under_way:
                break
            index, attempt = under_way.popleft()
            try:
                results[index] = attempt.result()
            except SottovoceError as error:
                results[index] = error
            except BaseException:
                for _, other in under_way:
                    other.handle.cancel()
                raise
            if on_error == "raise" and isinstance(results[index], SottovoceError):
                for _, other in under_way:
                    other.handle.cancel()
                break
        for result in results:
            if on_error == "raise" and isinstance(result, SottovoceError):
                raise result
        return results

    def _stream(self, requests: list[Request], plans: list[PromptPlan]) -> Iterator[AudioChunk]:
        joiner = Joiner(SAMPLE_RATE) if len(requests) > 1 else None
        num_tokens = num_frames = 0
        is_cut = False
        for index, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            num_tokens += len(plan)
            handle = self._submit(request, plan, request.sampling.seed)
            try:
                for event in handle:
                    num_frames += len(event.codes)
                    is_over = event.finish_reason is not None
                    is_cut |= event.finish_reason == "length"
                    is_last = is_over and index + 1 == len(requests)
                    samples = event.samples if joiner is None else joiner.feed(event.samples)
                    if joiner is not None and is_over:
                        rest = joiner.finish() if is_last else joiner.end_segment(pause_after_s(request.text))
                        samples = np.concatenate((samples, rest))
                    if is_last:
                        usage = Usage(num_tokens, num_frames)
                        yield AudioChunk(samples, SAMPLE_RATE, event.codes, "length" if is_cut else "stop", usage)
                    elif len(samples):
                        yield AudioChunk(samples, SAMPLE_RATE, event.codes)
            finally:
                handle.cancel()


def _to_stderr(notice: str) -> None:
    print(notice, file=sys.stderr)
