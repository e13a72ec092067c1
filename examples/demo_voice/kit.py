"""Stage 0: the synthesizers and texts, from the machine or from an archive that is carried along.

`python kit.py kit.tar.xz` on a Debian machine packs flite, espeak-ng (with the languages that are needed), every
library they use but the C library's own, and the fortunes, taken from Debian's packages. Unpacked anywhere on a Linux
machine of the same architecture, with a C library that is not older, they run without being installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from settings import ESPEAK_VOICES
from words import FORTUNES

PACKAGES = (
    "flite", "libflite1", "espeak-ng", "espeak-ng-data", "libespeak-ng1", "fortunes", "fortunes-min", "fortunes-de",
    "fortunes-es", "fortunes-it", "fortunes-br", "fortunes-ru",
)  # fmt: skip
BINARIES = ("flite", "espeak-ng")
# Of the C library, which must be the other machine's own.
SYSTEM_LIBRARIES = re.compile(r"^(ld-linux.*|lib(c|m|dl|rt|pthread|resolv|util))\.so")
DICTIONARIES = {f"{voice.split('-')[0]}_dict" for voice in ESPEAK_VOICES.values()}
GAMES = Path("usr/share/games/fortunes")


@dataclass(frozen=True)
class Kit:
    """How to call the synthesizers, and the folder of fortunes if there is one. `environment` is for subprocesses."""

    commands: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    fortunes: Path | None = None


def find_kit(archive: Path | None, folder: Path) -> Kit:
    """Of an archive, unpacked into `folder` once, or else of what is installed.

    Raises FileNotFoundError that says what to install.
    """
    if archive is not None:
        if not (folder / "bin").is_dir():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            with tarfile.open(archive) as tar:
                tar.extractall(partial, filter="data")
            partial.rename(folder)
        return _unpacked(folder)
    commands = {name: shutil.which(name) for name in BINARIES}
    missing = [name for name, path in commands.items() if path is None]
    if missing:
        raise FileNotFoundError(f"{' and '.join(missing)} missing: apt-get install {' '.join(missing)}, or give --kit")
    installed = Path("/") / GAMES
    return Kit({name: str(path) for name, path in commands.items()}, {}, installed if installed.is_dir() else None)


def pack_kit(target: Path) -> Path:
    """Writes the archive. Needs `apt-get download`, `dpkg` and `ldd`; libraries come from the machine itself."""
    with tempfile.TemporaryDirectory() as folder:
        debs, root, kit = (Path(folder) / name for name in ("debs", "root", "kit"))
        debs.mkdir()
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=debs, check=True, capture_output=True)
        for deb in sorted(debs.glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
        (kit / "bin").mkdir(parents=True)
        (kit / "lib").mkdir()
        for name in BINARIES:
            shutil.copy(root / "usr/bin" / name, kit / "bin")
            for library in _libraries(kit / "bin" / name, root):
                shutil.copy(library, kit / "lib")
        data = next(root.glob("usr/lib/*/espeak-ng-data"))
        shutil.copytree(data, kit / "espeak-ng-data", ignore=_unneeded)
        for name in {name for names in FORTUNES.values() for name in names}:
            if (root / GAMES / name).is_file():
                (kit / "fortunes" / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / GAMES / name, kit / "fortunes" / name)
        (kit / "licences").mkdir()
        for path in root.glob("usr/share/doc/*/copyright"):
            shutil.copy(path, kit / "licences" / path.parent.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(target, "w:xz") as tar:
            for path in sorted(kit.iterdir()):
                tar.add(path, path.name)
    return target


def _unpacked(folder: Path) -> Kit:
    environment = {"LD_LIBRARY_PATH": str(folder / "lib"), "ESPEAK_DATA_PATH": str(folder)}
    commands = {name: str(folder / "bin" / name) for name in BINARIES}
    return Kit(commands, environment, folder / "fortunes")


def _libraries(binary: Path, root: Path) -> list[Path]:
    """Those that the binary and its libraries need; of the unpacked packages where they are there."""
    own = ":".join(str(path) for path in root.glob("usr/lib/*") if path.is_dir())
    listed = subprocess.run(
        ["ldd", str(binary)], check=True, capture_output=True, text=True, env={"LD_LIBRARY_PATH": own}
    )
    found = []
    for line in listed.stdout.splitlines():
        name, _, rest = line.strip().partition(" => ")
        path = rest.split(" (")[0]
        if rest and path == "not found":
            raise FileNotFoundError(f"{name} is missing: apt-get install {' '.join(BINARIES)}")
        if rest and not SYSTEM_LIBRARIES.match(name):
            found.append(Path(path))
    return found


def _unneeded(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if name.endswith("_dict") and name not in DICTIONARIES} | ({"mbrola_ph"} & {*names})


if __name__ == "__main__":
    print(pack_kit(Path(sys.argv[1] if len(sys.argv) > 1 else "kit.tar.xz")))
