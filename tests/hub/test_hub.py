"""Model names to folders, with a local cache in place of the hub."""

import pytest

from sottovoce.hub import demo_folder, resolve
from sottovoce.types import InputError, NotFoundError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache that holds one model at one commit."""
    commit = "a" * 40
    repo = tmp_path / "models--Qwen--Qwen3-TTS-12Hz-0.6B-Base"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return snapshot


def test_no_name_is_the_demo():
    assert resolve(None) == demo_folder()


def test_a_folder_is_itself(tmp_path):
    assert resolve(tmp_path) == tmp_path


def test_a_folder_has_no_revision(tmp_path):
    with pytest.raises(InputError, match="revision"):
        resolve(tmp_path, revision="main")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-TTS-12Hz-0.6B-Base", "0.6B-Base"])
def test_offline_takes_the_cache(cache, name):
    assert resolve(name, offline=True) == cache


def test_a_pinned_revision_that_is_not_cached(cache):
    assert resolve("0.6B-Base", offline=True, revision="a" * 40) == cache
    with pytest.raises(NotFoundError, match="at revision"):
        resolve("0.6B-Base", offline=True, revision="b" * 40)


def test_not_cached_and_offline_by_environment(cache, monkeypatch):
    monkeypatch.setenv("SOTTOVOCE_OFFLINE", "1")
    with pytest.raises(NotFoundError, match="offline mode"):
        resolve("1.7B-Base")


@pytest.mark.parametrize("name", ["/nowhere/model", "./model", "~/nowhere", "a/b/c", "model.safetensors"])
def test_a_missing_folder_is_not_asked_of_the_hub(name):
    with pytest.raises(NotFoundError, match="does not exist"):
        resolve(name)


def test_a_misspelt_short_name():
    with pytest.raises(NotFoundError, match="did you mean '1\\.7B-VoiceDesign'"):
        resolve("1.7B-VoiceDesing")
