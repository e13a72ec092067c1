"""From prepared clips to batches: tasks and layouts, a budget of tokens, epochs, no memory of what was asked before."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sottovoce.config import ModelConfig
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.train.corpus import BatchStream, Examples, PromptOptions, held_out
from sottovoce.train.shards import ClipInfo, Corpus, write_manifest, write_shard
from sottovoce.types import InputError
from tests.train.talker_cases import codes_of, folder_of

WIDTH, NUM_CLIPS = 64, 24


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Clips of 3 to 60 frames in two shards, of two presets in turn; every third has a reference of its own."""
    folder, shards = tmp_path_factory.mktemp("corpus"), []
    for shard in range(2):
        clips, codes, first = [], [], 0
        for row in range(NUM_CLIPS // 2):
            index = shard * NUM_CLIPS // 2 + row
            num_frames, num_ref = 3 + (index * 17) % 58, 5 if index % 3 == 0 else 0
            speaker, text = ("Ryan", "eric")[index % 2], f"Clip {index}."
            ref_text = "As I said." if num_ref else None
            clips.append(
                ClipInfo(text, "english", speaker, "Calm.", ref_text, f"{index}.wav", first, num_frames, num_ref, row)
            )
            codes.append(codes_of(num_frames + num_ref, seed=index))
            first += num_frames + num_ref
        vectors = [np.full(WIDTH, shard * NUM_CLIPS // 2 + row, np.float32) for row in range(NUM_CLIPS // 2)]
        shards.append(folder / f"shard-{shard:05d}.safetensors")
        write_shard(shards[-1], "key", clips, codes, vectors, [])
    write_manifest(folder, {"codec": "0", "vector_width": WIDTH, "num_clips": NUM_CLIPS, "audio_s": 1.0}, shards)
    return Corpus(folder)


def examples(corpus, kind: str, task: str, seed: int = 0, **options) -> Examples:
    folder = folder_of(kind)
    return Examples(
        corpus, ModelConfig.from_folder(folder), TextTokenizer.from_folder(folder), PromptOptions(task, **options), seed
    )


def test_clips_are_found_in_their_shards(corpus):
    for index, clip in enumerate(corpus.clips):
        both = codes_of(clip.num_frames + clip.num_ref_frames, seed=index)
        np.testing.assert_array_equal(corpus.codes(clip), both[: clip.num_frames])
        np.testing.assert_array_equal(corpus.ref_codes(clip), both[clip.num_frames :])
        assert (corpus.vector(clip) == index).all()


def test_each_task_has_its_voice(corpus):
    made = examples(corpus, "custom_voice", "speakers", auto_share=0.0)
    config = made.config.talker
    for index in (0, 1):
        codes = made.make(index, 0).plan.codec_ids[:, 0]
        assert config.spk_id[("ryan", "eric")[index]] in codes and config.codec_language_id["english"] in codes
    instructed = made.make(0, 0).plan
    design = examples(corpus, "voice_design", "design").make(0, 0).plan
    assert len(design) > 20 and design.x_vector is None and len(instructed) > 20
    clone = examples(corpus, "base", "clone").make(4, 0).plan
    assert (clone.x_vector == 4).all() and clone.num_ref_frames == 0
    made = examples(corpus, "base", "icl")
    own = made.make(3, 0).plan
    np.testing.assert_array_equal(own.ref_codes, corpus.ref_codes(corpus.clips[3]))
    assert (own.x_vector == 3).all()
    others = {int(made.make(4, epoch).plan.x_vector[0]) for epoch in range(12)}
    assert len(others) > 3 and 4 not in others and all(other % 2 == 0 for other in others)  # of the same speaker
    other = int(made.make(4, 1).plan.x_vector[0])
    np.testing.assert_array_equal(made.make(4, 1).plan.ref_codes, corpus.codes(corpus.clips[other]))


def test_layouts_and_languages_that_are_not_told(corpus):
    long = [i for i, clip in enumerate(corpus.clips) if clip.num_frames > 10]
    lengths = {}
    for layout in ("text_first", "streaming", "both"):
        made = examples(corpus, "base", "clone", layout=layout)
        lengths[layout] = [len(made.make(index, 0).plan.trailing_ids) for index in long]
    assert set(lengths["text_first"]) == {1} and min(lengths["streaming"]) > 1
    assert 1 in lengths["both"] and max(lengths["both"]) > 1
    made = examples(corpus, "base", "clone", auto_share=0.5)
    language = made.config.talker.codec_language_id["english"]
    told = [language in made.make(index, epoch).plan.codec_ids[:, 0] for index in range(24) for epoch in range(4)]
    assert 0.3 < np.mean(told) < 0.7


def test_batches_keep_to_the_budget_and_an_epoch_has_each_clip_once(corpus):
    made = examples(corpus, "base", "clone")
    stream = BatchStream(made, 200, seed=1)
    seen, index = [], 0
    while len(seen) < NUM_CLIPS:
        clips, epoch = stream.clips_at(index)
        batch = stream[index]
        assert epoch == 0 and (batch.num_tokens <= 200 or len(clips) == 1)
        assert [len(example.codes) for example in batch.examples] == [corpus.clips[i].num_frames for i in clips]
        seen += clips
        index += 1
    assert sorted(seen) == list(range(NUM_CLIPS)) and stream.clips_at(index)[1] == 1
    padding = 1 - sum(made.lengths) / sum(
        len(stream.clips_at(i)[0]) * made.lengths[stream.clips_at(i)[0]].max() for i in range(index)
    )
    assert padding < 0.25


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(30, 500))
def test_a_batch_is_the_same_whenever_it_is_asked_for(corpus, order, max_tokens):
    made = examples(corpus, "base", "icl", layout="both")
    fresh, used = BatchStream(made, max_tokens), BatchStream(made, max_tokens)
    for index in order:
        used.clips_at(index)
    last = order[-1]
    assert used.clips_at(last) == fresh.clips_at(last)
    first, second = used[last], fresh[last]
    for field in dataclasses.fields(first)[2:]:
        assert (getattr(first, field.name) == getattr(second, field.name)).all()


def test_some_clips_are_kept_for_validation(corpus):
    train, validate = held_out(100, 0.1, 64)
    assert len(validate) == 10 and not set(train) & set(validate) and len(train) == 90
    assert [list(part) for part in held_out(100, 0.1, 64)] == [list(train), list(validate)]
    assert len(held_out(1, 0.9, 64)[0]) == 1 and len(held_out(1000, 0.5, 64)[1]) == 64
    made = examples(corpus, "base", "clone")
    stream = BatchStream(made, 200, indices=[3, 4])
    assert {clip for i in range(10) for clip in stream.clips_at(i)[0]} == {3, 4}
    assert sorted(clip for clips in stream.once() for clip in clips) == [3, 4]


def test_unknown_names_are_refused():
    with pytest.raises(InputError, match="did you mean 'speakers'"):
        PromptOptions("speaker")
    with pytest.raises(InputError, match="text_first"):
        PromptOptions("icl", layout="text")
