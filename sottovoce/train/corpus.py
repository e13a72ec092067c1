"""Prepared clips to endless batches: which task a clip is trained for, and which clips share a batch.

A task says whose voice stands in the prompt: a speaker of the model's table, a description, a speaker vector, or a
reference recording with its words. Everything random follows from (seed, epoch, clip), so batch n is the same whenever
it is asked for. Knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from sottovoce.config import ModelConfig
from sottovoce.model.prompt import PromptPlan, Tokenizer, build_prompt
from sottovoce.train.batches import Example, TalkerBatch, collate
from sottovoce.train.shards import ClipInfo, Corpus
from sottovoce.types import InputError, Request, Voice, nearest

Task = Literal["speakers", "design", "clone", "icl"]
Layout = Literal["default", "text_first", "streaming", "both"]
TASKS: dict[Task, str] = {"speakers": "custom_voice", "design": "voice_design", "clone": "base", "icl": "base"}
LAYOUTS = ("default", "text_first", "streaming", "both")
MAX_REF_FRAMES = 188  # 15 s: longer references of other clips are not drawn
CONTROL_ROWS = 16  # of a prompt besides its texts, rounded up
WINDOW_BATCHES = 32  # batches whose clips are sorted by length together
KEPT_PROMPTS = 1 << 16  # each half a millisecond to make and some 5 kB to keep


@dataclass(frozen=True)
class PromptOptions:
    """
    Args:
        task: "speakers" of the table (CustomVoice), "design" by the clip's instruction (VoiceDesign), "clone" by a
            speaker vector, "icl" by a reference recording and its words: the clip's own, else another clip of the same
            speaker (Base).
        layout: where the text goes: as the kind of model has it by default, all of it before the speech, a token a
            frame, or either by chance.
        auto_share: share of the clips whose language is not told, so that "auto" keeps working.
        speaker: of the clips that name none.
    """

    task: Task
    layout: Layout = "default"
    auto_share: float = 0.1
    speaker: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("task", TASKS), ("layout", LAYOUTS)):
            value = getattr(self, name)
            if value not in known:
                wanted = ", ".join(known)
                raise InputError(f"{name} {value!r} is not one of {wanted}{nearest(value, known)}", field=name)


class Examples:
    """Examples of a corpus for one model.

    Args:
        config: of the model as it will be exported, with its new speakers.

    Raises InputError for a task that the corpus or the model cannot serve.
    """

    def __init__(
        self, corpus: Corpus, config: ModelConfig, tokenizer: Tokenizer, options: PromptOptions, seed: int = 0
    ) -> None:
        self.corpus, self.config, self.tokenizer, self.options, self.seed = corpus, config, tokenizer, options, seed
        if config.kind != TASKS[options.task]:
            raise InputError(
                f"task {options.task!r} trains a {TASKS[options.task]} model; this one is {config.kind}", field="task"
            )
        self._fixed_prompt = lru_cache(KEPT_PROMPTS)(self._prompt)
        self._by_speaker: dict[str, list[int]] = {}
        for index, clip in enumerate(corpus.clips):
            self._by_speaker.setdefault(self._speaker(clip), []).append(index)
        self._check()
        self.lengths = np.array([self._length(clip) for clip in corpus.clips])

    def __len__(self) -> int:
        return len(self.corpus.clips)

    def make(self, index: int, epoch: int) -> Example:
        """The example of a clip in an epoch."""
        clip, rng = self.corpus.clips[index], np.random.default_rng((self.seed, epoch, index))
        layouts = {"default": None, "text_first": False, "streaming": True, "both": bool(rng.integers(2))}
        language = "auto" if rng.random() < self.options.auto_share else clip.language
        layout = layouts[self.options.layout]
        if self.options.task in ("speakers", "design"):  # the same in every epoch
            plan = self._fixed_prompt(index, language, layout)
        else:
            plan = self._prompt(index, language, layout, rng)
        return Example(plan, self.corpus.codes(clip))

    def _prompt(
        self, index: int, language: str, layout: bool | None, rng: np.random.Generator | None = None
    ) -> PromptPlan:
        """`rng` chooses references, where the task has some."""
        clip = self.corpus.clips[index]
        request = Request(
            clip.text,
            language,
            self._voice(index, clip, rng),
            clip.instruct if self.options.task == "speakers" and self.config.can_instruct else None,
            is_streaming_text=layout,
        )
        return build_prompt(self.config, self.tokenizer, request)

    def _voice(self, index: int, clip: ClipInfo, rng: np.random.Generator | None) -> Voice:
        task, corpus = self.options.task, self.corpus
        if task == "speakers":
            return Voice(speaker=self._speaker(clip))
        if task == "design":
            return Voice(instruct=clip.instruct)
        if task == "clone":
            return Voice(x_vector=corpus.vector(clip))
        if clip.num_ref_frames:
            return Voice(x_vector=corpus.vector(clip), ref_codes=corpus.ref_codes(clip), ref_text=clip.ref_text)
        assert rng is not None
        others = [i for i in self._of_speaker(clip) if i != index]
        short = [i for i in others if corpus.clips[i].num_frames <= MAX_REF_FRAMES] or others
        other = corpus.clips[short[rng.integers(len(short))]]
        return Voice(x_vector=corpus.vector(other), ref_codes=corpus.codes(other), ref_text=other.text)

    def _speaker(self, clip: ClipInfo) -> str:
        return speaker_of(clip, self.options.speaker)

    def _of_speaker(self, clip: ClipInfo) -> list[int]:
        return self._by_speaker[self._speaker(clip)]

    def _check(self) -> None:
        task, clips = self.options.task, self.corpus.clips
        known = {name.lower() for name in self.config.talker.spk_id}
        for clip in clips:
            if task == "speakers" and self._speaker(clip) not in known:
                raise InputError(f"{clip.audio}: speaker {self._speaker(clip)!r} is not in the model", field="speaker")
            if task == "design" and not clip.instruct:
                raise InputError(f"{clip.audio} has no instruct, the description of its voice", field="instruct")
            if task == "icl" and not clip.num_ref_frames and len(self._of_speaker(clip)) < 2:
                raise InputError(f"{clip.audio} is its speaker's only clip and has no reference", field="ref_audio")
        if task in ("clone", "icl") and not self.corpus.has_vectors:
            raise InputError("the set has no speaker vectors; prepare it with a Base model", field="data")

    def _length(self, clip: ClipInfo) -> int:
        """Positions of its example, rounded up; with another clip as reference, one of the ordinary length."""
        num = len(self.tokenizer.user_ids(clip.text + (clip.instruct or "") + (clip.ref_text or "")))
        num += clip.num_frames + clip.num_ref_frames + CONTROL_ROWS
        if self.options.task == "icl" and not clip.num_ref_frames:
            num += MAX_REF_FRAMES // 2
        return num


def speaker_of(clip: ClipInfo, default: str | None) -> str:
    """In lower case; "" for nobody."""
    return (clip.speaker or default or "").lower()


class BatchStream:
    """Batches without end, epoch after epoch, each of at most `max_tokens` positions, padding included (a longer clip
    comes alone).

    Args:
        indices: clips to take; None all.
    """

    def __init__(
        self, examples: Examples, max_tokens: int, *, seed: int = 0, indices: Sequence[int] | None = None
    ) -> None:
        self.examples, self.max_tokens, self.seed = examples, max_tokens, seed
        self.indices = np.arange(len(examples)) if indices is None else np.asarray(indices)
        if not len(self.indices):
            raise InputError("there is no clip to train on", field="data")
        self._first = [0]  # batch of each epoch
        self._epoch, self._plan = 0, self._plan_of(0)

    def __getitem__(self, index: int) -> TalkerBatch:
        return self.collate(*self.clips_at(index))

    def clips_at(self, index: int) -> tuple[list[int], int]:
        """Clips of batch `index`, and the epoch."""
        while index >= self._first[-1]:
            self._first.append(self._first[-1] + len(self._plan_at(len(self._first) - 1)))
        epoch = int(np.searchsorted(self._first, index, side="right")) - 1
        return self._plan_at(epoch)[index - self._first[epoch]], epoch

    def once(self) -> list[list[int]]:
        """Clips of batches that are always the same, each clip once."""
        return self._plan_of(0)

    def collate(self, clips: Sequence[int], epoch: int) -> TalkerBatch:
        made = [self.examples.make(int(index), epoch) for index in clips]
        return collate(made, self.examples.config.talker.codec_eos_token_id)

    def _plan_at(self, epoch: int) -> list[list[int]]:
        if self._epoch != epoch:
            self._epoch, self._plan = epoch, self._plan_of(epoch)
        return self._plan

    def _plan_of(self, epoch: int) -> list[list[int]]:
        """Clips of each batch: shuffled, then sorted by length within a window, so that a batch has little padding."""
        rng = np.random.default_rng((self.seed, epoch))
        order, lengths = rng.permutation(self.indices), self.examples.lengths
        window = max(1, WINDOW_BATCHES * self.max_tokens // max(1, int(lengths[self.indices].mean())))
        batches: list[list[int]] = []
        for start in range(0, len(order), window):
            part = order[start : start + window]
            batch: list[int] = []
            for index in part[np.argsort(lengths[part], kind="stable")]:
                if batch and (len(batch) + 1) * lengths[index] > self.max_tokens:
                    batches.append(batch)
                    batch = []
                batch.append(int(index))
            batches.append(batch)
        return [batches[i] for i in rng.permutation(len(batches))]


def held_out(num_clips: int, share: float, max_clips: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Indices of clips to train on and to validate with, the same for the same seed. One at least is trained on."""
    order = np.random.default_rng((seed, 7)).permutation(num_clips)
    count = min(max_clips, int(share * num_clips), num_clips - 1)
    return np.sort(order[count:]), np.sort(order[:count])
