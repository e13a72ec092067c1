"""A trained talker as a checkpoint: bit for bit in us, code for code in the official package; speakers; adapters."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sottovoce.config import ModelConfig
from sottovoce.model.prompt import build_prompt, embed_prompt
from sottovoce.model.reference import generate
from sottovoce.model.weights import load_network
from sottovoce.tensorfile import read_index
from sottovoce.text.tokenizer import TextTokenizer
from sottovoce.train.corpus import PromptOptions
from sottovoce.train.export import load_speaker_encoder
from sottovoce.train.loop import LoopOptions
from sottovoce.train.optim import AdamOptions
from sottovoce.train.prepare import Preparer
from sottovoce.train.recipe import TalkerRecipe
from sottovoce.train.shards import Corpus
from sottovoce.train.speakers import add_speakers, free_rows, mean_vectors
from sottovoce.train.trainer import train_talker
from sottovoce.types import InputError, Request, Sampling, Voice
from tests.oracle import load_official
from tests.train.talker_cases import PARTS, folder_of
from tests.train.voices import good_set

LOOP = LoopOptions(max_steps=3, learning_rate=2e-3, warmup_steps=0, validate_every=2, save_every=3)
TABLE = "talker.model.codec_embedding.weight"


def prepared(folder, base, num_clips: int = 5, **more: str):
    Preparer(base).run(good_set(folder / "in", num_clips, **more), folder / "data")
    return folder / "data"


@pytest.fixture(scope="module")
def from_base(tmp_path_factory):
    """A Base model of two new speakers, trained a little: (folder of the run, base, data)."""
    folder, base = tmp_path_factory.mktemp("export"), folder_of("base")
    data = prepared(folder, base)
    train_talker(base, data, folder / "run", prompts=PromptOptions("speakers"), loop=LOOP, is_quiet=True)
    return folder / "run", base, data


def tensors(folder) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def speak(folder, text: str, speaker: str, max_frames: int) -> np.ndarray:
    network = load_network(folder, dtype=torch.float32, parts=PARTS)
    plan = build_prompt(network.config, TextTokenizer.from_folder(folder), Request(text, voice=Voice(speaker=speaker)))
    return generate(network, *embed_prompt(network, plan), Sampling.greedy(), max_frames)[0].numpy()


def test_two_speakers_are_two_rows_each_the_mean_of_its_own_clips(from_base):
    run, base, data = from_base
    corpus, config = Corpus(data), ModelConfig.from_folder(run / "model")
    assert config.kind == "custom_voice" and set(config.talker.spk_id) == {"ann", "bob"}
    table = tensors(run / "model")[TABLE]
    for name in ("ann", "bob"):
        own = [corpus.vector(clip) for clip in corpus.clips if clip.speaker.lower() == name]
        assert len(own) in (2, 3)
        mean = torch.from_numpy(np.mean(own, axis=0, dtype=np.float64).astype(np.float32))
        assert torch.equal(table[config.talker.spk_id[name]], mean.to(torch.bfloat16))
    assert not torch.equal(*(table[config.talker.spk_id[name]] for name in ("ann", "bob")))
    before = tensors(base)[TABLE]
    assert not torch.equal(before[:2048], table[:2048])  # the rest of the table was trained


def test_it_is_whole_and_what_was_not_trained_is_untouched(from_base):
    run, base, _ = from_base
    model, old, new = run / "model", tensors(base), tensors(run / "model")
    changed = {name for name, tensor in new.items() if not torch.equal(tensor, old[name])}
    assert set(new) - changed == {"talker.model.text_embedding.weight"}
    assert all(tensor.dtype == torch.bfloat16 for tensor in new.values())
    for name in ("vocab.json", "merges.txt", "generation_config.json", "speech_tokenizer/model.safetensors"):
        assert (model / name).read_bytes() == (base / name).read_bytes()
    edited, original = (json.loads((folder / "config.json").read_text()) for folder in (model, base))
    differing = {key for key in original if original[key] != edited.get(key)}
    assert differing == {"tts_model_type", "talker_config"} and set(original) == set(edited)
    encoder = load_speaker_encoder(model)
    for name, tensor in load_speaker_encoder(base).state_dict().items():
        assert torch.equal(tensor, encoder.state_dict()[name])
    card = (model / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n") and "ann, bob" in card and "| clips | 5 |" in card


def test_the_official_package_speaks_the_same_codes(from_base):
    run, _, _ = from_base
    official, frames = load_official(run / "model"), []
    official.model.speech_tokenizer.decode = lambda items: (
        frames.extend(item["audio_codes"] for item in items),
        ([np.zeros(0, np.float32)] * len(items), 24000),
    )[1]
    assert set(official.get_supported_speakers()) == {"ann", "bob"}
    greedy = {"do_sample": False, "subtalker_dosample": False, "max_new_tokens": 13}
    official.generate_custom_voice(["Hello."] * 2, ["ann", "bob"], ["auto"] * 2, **greedy)
    for name, codes in zip(("ann", "Bob"), frames, strict=True):
        np.testing.assert_array_equal(speak(run / "model", "Hello.", name, 12), codes.numpy())


def test_a_run_that_goes_on_ends_in_the_same_export(from_base, tmp_path):
    run, base, data = from_base
    options = {"prompts": PromptOptions("speakers"), "is_quiet": True}
    train_talker(base, data, tmp_path / "run", loop=LoopOptions(**{**vars(LOOP), "save_every": 2}), **options)
    last = max((tmp_path / "run" / "state").glob("step-*"))
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    train_talker(base, data, tmp_path / "run", loop=LOOP, **options)
    assert (tmp_path / "run" / "model" / "model.safetensors").read_bytes() == (
        run / "model" / "model.safetensors"
    ).read_bytes()


def test_a_fine_tune_is_fine_tuned(from_base, tmp_path):
    """New speakers join earlier ones, whose rows and speaker encoder stay."""
    run, _, _ = from_base
    data = prepared(tmp_path, run / "model", 2, speakers=("Cid",))
    assert Corpus(data).has_vectors
    train_talker(run / "model", data, tmp_path / "run", loop=LoopOptions(max_steps=1), is_quiet=True)
    before, after = ModelConfig.from_folder(run / "model"), ModelConfig.from_folder(tmp_path / "run" / "model")
    assert set(after.talker.spk_id) == {"ann", "bob", "cid"}
    assert after.talker.spk_id["ann"] == before.talker.spk_id["ann"]
    mean = np.mean([Corpus(data).vector(clip) for clip in Corpus(data).clips], axis=0)
    row = tensors(tmp_path / "run" / "model")[TABLE][after.talker.spk_id["cid"]]
    torch.testing.assert_close(row.float(), torch.from_numpy(mean), rtol=1e-2, atol=1e-3)
    assert load_speaker_encoder(tmp_path / "run" / "model") is not None


@pytest.mark.parametrize("kind,task", [("base", "clone"), ("base", "icl"), ("voice_design", "design")])
def test_other_tasks_keep_the_kind(tmp_path, kind, task):
    base, more = folder_of(kind), {"instruct": "Calm."} if kind == "voice_design" else {}
    data = prepared(tmp_path, base, 3, speakers=("Ann",), **more)
    recipe = TalkerRecipe(text_table="trained")
    options = {"prompts": PromptOptions(task, layout="both"), "recipe": recipe, "loop": LOOP}
    train_talker(base, data, tmp_path / "run", is_quiet=True, **options)
    model = tmp_path / "run" / "model"
    assert (model / "config.json").read_bytes() == (base / "config.json").read_bytes()
    old, new = tensors(base), tensors(model)
    assert not torch.equal(old["talker.model.text_embedding.weight"], new["talker.model.text_embedding.weight"])
    kept = [name for name in old if name.startswith("speaker_encoder.")]
    assert bool(kept) == (kind == "base") and all(torch.equal(old[name], new[name]) for name in kept)
    load_network(model)


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_adapters_are_merged_into_plain_weights(tmp_path, method):
    base = folder_of("custom_voice")
    data = prepared(tmp_path, base, 3, speakers=("Ryan",))
    recipe = TalkerRecipe(method=method, rank=2, alpha=4)
    train_talker(base, data, tmp_path / "run", recipe=recipe, loop=LOOP, adam=AdamOptions(state_bits=8), is_quiet=True)
    model = tmp_path / "run" / "model"
    assert json.loads((model / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    from safetensors.torch import load_file

    adapter = load_file(model / "adapter" / "adapter_model.safetensors")
    old, new = tensors(base), tensors(model)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {name for name in old if "talker.model.layers" in name and name.endswith("proj.weight")}
    for name in changed:
        stem = "base_model.model." + name.removesuffix(".weight")
        delta = 2 * adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
        assert torch.equal(new[name], (old[name].float() + delta).to(torch.bfloat16))
    assert len(speak(model, "Hello.", "vivian", 3)) == 3


def test_speakers_join_those_that_are_there():
    config_json = json.loads((folder_of("custom_voice") / "config.json").read_text())
    before = config_json["talker_config"]["spk_id"]
    edited = add_speakers(config_json, ["Ann", "ann", "Ryan", "Bob"])["talker_config"]
    assert {name: row for name, row in edited["spk_id"].items() if name in before} == before
    assert set(edited["spk_id"]) == {*before, "ann", "bob"}
    rows = [edited["spk_id"]["ann"], edited["spk_id"]["bob"]]
    config = ModelConfig.from_dict(config_json)
    assert rows == free_rows(config)[:2] and len({*rows, *before.values()}) == len(before) + 2
    taken = {config.talker.codec_eos_token_id, config.talker.codec_pad_id, *config.talker.codec_language_id.values()}
    assert not taken & set(free_rows(config)) and min(free_rows(config)) >= 2048
    assert edited["spk_is_dialect"]["ann"] is False and edited["spk_is_dialect"]["eric"] == "sichuan_dialect"
    with pytest.raises(InputError, match="room for"):
        add_speakers(config_json, [f"s{i}" for i in range(2000)])


def test_means_are_added_up_in_more_than_bf16():
    vectors = [("Ann", np.full(4, 1 + i / 1000, np.float32)) for i in range(1000)]
    np.testing.assert_allclose(mean_vectors([*vectors, ("bob", np.ones(4, np.float32))])["ann"], 1.4995, rtol=1e-6)


def test_a_sharded_base_becomes_one_file(from_base, tmp_path):
    from safetensors.torch import save_file

    from sottovoce.train.export import export_model
    from sottovoce.train.recipe import load_task

    base, sharded = folder_of("base"), tmp_path / "base"
    sharded.mkdir()
    for path in base.iterdir():
        if path.name != "model.safetensors":
            (sharded / path.name).symlink_to(path)
    before = tensors(base)
    names = sorted(before)
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for shard in set(places.values()):
        save_file({name: before[name] for name in names if places[name] == shard}, sharded / shard)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    export_model(load_task(sharded, TalkerRecipe()).network, sharded, tmp_path / "out")
    after = tensors(tmp_path / "out")
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not list((tmp_path / "out").glob("model-*")) and len(read_index(tmp_path / "out")) == len(names)
