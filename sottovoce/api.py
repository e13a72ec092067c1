"""The front door: load a model, speak, stream, batch, close. The one place where the parts are wired together.

Everything heavy lies behind it: prompts (`model/prompt.py`), batching (`engine/`), samples (`codec/`), voices
(`voices.py`), repeating and joining (`attempts.py`). This file checks what users give and cuts long texts.
"""

from __future__ import annotations

import secrets
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sottovoce import hub
from sottovoce.api_codec import LOAD_OPTIONS, Codec, as_dtype
from sottovoce.assembly import build_engine, place, plan_for
from sottovoce.attempts import Company, Prepared, about_item, streamed
from sottovoce.audio.io import AudioInput
from sottovoce.codec.codec import DecodeMode
from sottovoce.engine.driver import Driver
from sottovoce.engine.pool import EnginePool
from sottovoce.memory.describe import describe
from sottovoce.memory.placement import Placement
from sottovoce.memory.plan import Plan, gigabytes
from sottovoce.memory.probe import DTYPES, dtype_name, pick_device, release_cached
from sottovoce.memory.trace import phase
from sottovoce.model.prompt import build_prompt
from sottovoce.text.language import resolve_language
from sottovoce.text.segment import budget_frames, is_speakable, split_text
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.types import (
    SAMPLE_RATE,
    AudioChunk,
    InputError,
    Request,
    Sampling,
    SottovoceError,
    Speech,
    Voice,
    reject_unknown,
)
from sottovoce.voices import Voices

__all__ = ["TTS", "Codec"]

Notice = Callable[[str], None]
Item = str | Request | Mapping[str, Any]

PLAN_OPTIONS = ("memory", "profile", "weights", "kv", "device_map", "max_rows")
OPTIONS = (*(f.name for kind in (Request, Sampling) for f in fields(kind)), "split")


class TTS:
    """A loaded model. Safe to use from any number of threads; what they ask for is batched together.

    Use `from_pretrained`. Close it, or use it as a context manager, to get the memory back.
    """

    sample_rate = SAMPLE_RATE

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        plan: Plan,
        is_hub: bool,
        notice: Notice,
        placement: Placement | None = None,
    ) -> None:
        self.folder, self.device, self.plan = folder, device, plan
        self.dtype = DTYPES[plan.layout.dtype]
        self._tokenizer = TextTokenizer.from_folder(folder, is_hub_snapshot=is_hub)
        engine = build_engine(folder, plan, device, placement)
        self.config = engine.network.config
        self._codec = Codec(folder, device=engine.audio.device)
        self._voices = Voices(folder, self.config, self._codec, device, notice)
        self._max_under_way = 2 * plan.layout.max_rows  # so that rows never wait for prompts to be built
        self._driver: Driver | None = Driver(engine)
        # For those who forget to close: the engine's thread would keep the model alive.
        self._finalizer = weakref.finalize(self, self._driver.close, drain=False)
        self.backends: Mapping[str, str] = {
            "device": str(device),
            "dtype": plan.layout.dtype,
            "weights": plan.weights,
            "codec": plan.layout.codec_dtype,
            "kernels": engine.runner.model.backend,
        }

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        offline: bool | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        memory: str | int | None = None,
        profile: str | None = None,
        weights: str | Mapping[str, str] | None = None,
        kv: str | None = None,
        device_map: str | Mapping[str, str | int] | None = None,
        max_rows: int | None = None,
        on_notice: Notice | None = None,
        **unknown: Any,
    ) -> TTS:
        """Loads a model as it is planned to be, see `memory.plan.make_plan`; the plan is kept as `plan`.

        Args:
            model: folder, hub id, or short name ("1.7B-VoiceDesign"); None is the small demo model of the package.
            revision: branch, tag or commit of a hub id.
            offline: never touch the network; None follows the environment.
            device: "cuda", "cuda:1", "cpu"; None takes a GPU if there is one.
            dtype: "bfloat16", "float16", "float32"; None takes what suits the device.
            memory: bytes that may be used in all ("4GB"), the device's context included; None is what is free. A plan
                that is asked for by memory or profile is told as a notice.
            profile: "realtime", "batch" or "longform"; None is realtime.
            weights: "int8", "int4" (talker; its predictor stays at int8), "fp8", or formats by part as
                {"talker": "int4", "predictor": "int4"}: products inside the layers are quantized while they are read.
                "none" keeps them as the checkpoint has them. None is that if it fits, else the best that does.
            kv: keys and values, "full" or "fp8"; None is the best that fits.
            device_map: "auto" for the GPU with the most free memory, or devices by part ("talker", "predictor",
                "codec", "text_embedding") or by official module name ("talker.model.layers.5"); the rest goes to
                `device`.
            max_rows: how many requests run at the same time, more wait; None is what fits and is of use.
            on_notice: is given one-line notices, such as which model or voice was chosen; None prints to stderr.

        Raises:
            NotFoundError: no such model here, or no such device.
            InputError: an option that does not exist or cannot be used; `field` names it.
            OutOfMemoryError: it does not fit, which is known before anything is loaded.
            CheckpointError: files that are incomplete or do not fit each other.
        """
        reject_unknown("option", unknown, (*LOAD_OPTIONS, *PLAN_OPTIONS, "on_notice"))
        precision = None if dtype is None else dtype_name(as_dtype(dtype, pick_device(device)))
        if max_rows is not None and (not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1):
            raise InputError(f"max_rows must be a whole number of at least 1, got {max_rows!r}", field="max_rows")
        notice = on_notice or _to_stderr
        if model is None:
            notice("no model named: using the bundled demo model (random values: sound, not words)")
        folder = hub.resolve(model, revision=revision, offline=offline)
        is_hub = model is not None and folder != Path(model).expanduser()
        wish = {"memory": memory, "profile": profile, "weights": weights, "kv": kv}
        chosen, placement = place(device, device_map, folder)
        plan = plan_for(folder, chosen, dtype=precision, rows=max_rows, placement=placement, **wish)
        if memory is not None or profile is not None:
            notice(describe(plan, folder.name))
        elif plan.compromises:
            notice(f"{gigabytes(plan.memory_bytes)} are free on {chosen}, so it has {' and '.join(plan.compromises)}")
        with phase("load"):
            return cls(folder, device=chosen, plan=plan, is_hub=is_hub, notice=notice, placement=placement)

    @classmethod
    def pool(
        cls, model: str | Path | None = None, *, devices: Sequence[str] | None = None, **options: Any
    ) -> EnginePool:
        """One process a device, each with the model; None is all GPUs here. It speaks as one model does: `generate`,
        `stream`, `batch`, `close`. `options` as of `from_pretrained`. A program that calls it as a script needs
        `if __name__ == "__main__":` around that.
        """
        if devices is None:
            devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
        return EnginePool(partial(cls.from_pretrained, model, **options), [{"device": device} for device in devices])

    @property
    def kind(self) -> str:
        """voice_design, custom_voice or base."""
        return self.config.kind

    @property
    def speakers(self) -> list[str]:
        """Preset speakers, in the model's order."""
        return list(self._voices.speakers)

    @property
    def languages(self) -> list[str]:
        return self.config.languages

    @property
    def rows(self) -> int:
        """How many requests are computed at a time: as planned, or what memory that ran out has left of it."""
        engine = self._check_open().engine
        return engine.guard.limits.most("decode", engine.capacity.max_rows)

    # -- speaking ------------------------------------------------------------------------------------------------

    def generate(self, text: str, *, on_audio: Callable[[float], None] | None = None, **options: Any) -> Speech:
        """Speaks a text and waits for all of it.

        Args:
            text: any length; cut at sentences where it is long, all pieces in one voice and with one seed.
            on_audio: is told, each time some audio has been made, how many seconds it lasts: for showing progress.
            options: see `request`; and `split`, which if False keeps the text as it is, in one piece.

        Raises:
            InputError, NotFoundError: something in the request cannot be used; `field` names it.
            RunawayError: the speech did not end by itself, also not on other seeds.
        """
        result = self._speak([self._pieces(text, **options)], on_audio)[0]
        if isinstance(result, SottovoceError):
            raise result
        return result

    def stream(self, text: str, *, ahead_s: float | None = None, **options: Any) -> Iterator[AudioChunk]:
        """Speaks a text and gives its audio while it comes. Closing the iterator cancels the rest.

        The joined chunks are the samples that `generate` gives with the same seed, which the last chunk names. Audio
        that has left cannot be taken back: a runaway is not repeated, its finish reason is then "length".

        Args:
            text, options: as for `generate`. What cannot be used is an error at the call, not at the first chunk.
            ahead_s: how many seconds the audio may be ahead of a listener who hears it from the first chunk on, before
                others go first; None takes all speed there is.
        """
        if ahead_s is not None and not (isinstance(ahead_s, int | float) and ahead_s > 0):
            raise InputError(f"ahead_s must be a number above 0 or None, got {ahead_s!r}", field="ahead_s")
        pieces = self._pieces(text, **options)
        return streamed(self._prepare(pieces[0]), pieces, self._prepare, ahead_s)

    def batch(
        self,
        items: Iterable[Item],
        *,
        on_error: Literal["raise", "return"] = "raise",
        **defaults: Any,
    ) -> list[Speech | SottovoceError]:
        """Speaks many texts at once; results in the order of the items, each as `generate` would give it.

        Args:
            items: texts, requests, or mappings of "text" and options (see `generate`) that override `defaults`.
            on_error: "return" puts the error in the place of its item; "raise" raises the first one, after all items
                have ended. The good items always finish.
        """
        if on_error not in ("raise", "return"):
            raise InputError(f"on_error must be 'raise' or 'return', got {on_error!r}", field="on_error")
        if isinstance(items, str | Mapping | Request):
            raise InputError(f"items must be a list of texts or requests, got a {type(items).__name__}", field="items")
        reject_unknown("option", defaults, OPTIONS)
        checked: list[list[Request] | SottovoceError] = []
        for item in items:
            try:
                checked.append(self._item(item, defaults))
            except SottovoceError as error:
                checked.append(error)
        spoken = iter(self._speak([pieces for pieces in checked if isinstance(pieces, list)]))
        results = [next(spoken) if isinstance(entry, list) else entry for entry in checked]
        results = [about_item(r, i) if isinstance(r, SottovoceError) else r for i, r in enumerate(results)]
        if on_error == "raise":
            for result in results:
                if isinstance(result, SottovoceError):
                    raise result
        return results

    def request(
        self,
        text: str,
        *,
        language: str | None = "auto",
        voice: Voice | str | Path | None = None,
        instruct: str | None = None,
        sampling: Sampling | None = None,
        seed: int | None = None,
        max_frames: int | None = None,
        is_streaming_text: bool | None = None,
        retries: int = 1,
        **changes: Any,
    ) -> Request:
        """A checked Request from what users write.

        Args:
            text: what to say.
            language: name or code of a language of the model, or "auto".
            voice: a Voice, a preset speaker's name, or a voice file.
            instruct: how to say it, or what the voice is like.
            sampling: how codes are drawn; None is the published way.
            seed: same seed, same speech, in any company; overrides the sampling's. None draws one, which the result
                names.
            max_frames: the most frames of 80 ms for each piece; None allows generously for the text.
            is_streaming_text: see `types.Request`.
            retries: how often a runaway is repeated on another seed.
            changes: of the sampling, by the names of its fields.
        """
        reject_unknown("option", changes, OPTIONS)
        sampling = Sampling() if sampling is None else sampling
        if seed is not None:
            changes["seed"] = seed
        if changes and isinstance(sampling, Sampling):
            sampling = sampling.with_(**changes)
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
        """A Voice from a preset speaker's name or a voice file. None is the first preset speaker, with a notice.

        Raises NotFoundError naming the nearest speaker, or InputError for what can be no voice.
        """
        return self._voices.pick(voice)

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
            ref_audio: a file, bytes, base64, or (samples, rate), of at most 60 s.
            ref_text: what is said in it, word for word: a closer clone. Without it only the speaker vector is used.
            language: spoken there.
            consent: a note on whose voice it is and that they agreed.
            field: how errors call the recording.
        """
        self._check_open()
        return self._voices.make(ref_audio, ref_text, language, consent, field)

    def encode(self, audio: AudioInput, *, field: str = "audio") -> np.ndarray:
        """Codes int64 [T, 16] of a recording."""
        self._check_open()
        return self._codec.encode(audio, field=field)

    def decode(self, codes: np.ndarray, *, mode: DecodeMode = "exact") -> np.ndarray:
        """Samples float32 [T * 1920] of codes [T, 16]; `mode` as in `codec.Codec.decode_stream`."""
        self._check_open()
        return self._codec.decode(codes, mode=mode)

    def close(self, *, drain: bool = True) -> None:
        """Refuses anything new, finishes what is under way (`drain` False: ends it with an error), and gives all memory
        back."""
        driver = self._driver
        if driver is None:
            return
        driver.close(drain=drain)
        with phase("unload"):
            self._driver = None
            self._finalizer.detach()
            self._voices.close()
            self._codec.close()
            release_cached(self.device)

    def __enter__(self) -> TTS:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.close(drain=kind is None)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _check_open(self) -> Driver:
        if self._driver is None:
            raise SottovoceError("this model is closed; load it again to go on")
        return self._driver

    def _item(self, item: Item, defaults: Mapping[str, Any]) -> list[Request]:
        if isinstance(item, Request):
            return self._pieces(**{f.name: getattr(item, f.name) for f in fields(Request)})
        if isinstance(item, str):
            item = {"text": item}
        if not isinstance(item, Mapping):
            raise InputError(f"an item is a text, a mapping or a Request, not a {type(item).__name__}", field="items")
        reject_unknown("option", item, OPTIONS)
        if "text" not in item:
            raise InputError("an item needs a text", field="text")
        return self._pieces(**{**defaults, **item})

    def _pieces(self, text: str, *, split: bool = True, **options: Any) -> list[Request]:
        """One request a piece of the text, all with one seed, which is drawn here if none was given."""
        request = self.request(text, **options)
        if request.sampling.seed is None:
            request = replace(request, sampling=request.sampling.with_(seed=secrets.randbits(62)))
        texts = split_text(text, request.language) if split else [text]
        return [replace(request, text=piece) for piece in texts or [text]]

    def _prepare(self, request: Request) -> Prepared:
        if not is_speakable(request.text):
            raise InputError("text has nothing to say: no letter and no digit in it", field="text")
        driver = self._check_open()
        plan = build_prompt(self.config, self._tokenizer, request)
        max_frames = request.max_frames or budget_frames(request.text)
        start = partial(driver.submit, plan=plan, sampling=request.sampling, max_frames=max_frames)
        return Prepared(request, len(plan), start)

    def _speak(
        self, items: list[list[Request]], on_audio: Callable[[float], None] | None = None
    ) -> list[Speech | SottovoceError]:
        self._check_open()
        return Company(items, self._prepare, self.backends, on_audio).speak(self._max_under_way)


def _to_stderr(notice: str) -> None:
    print(notice, file=sys.stderr)
