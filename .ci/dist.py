"""Builds the sdist and the wheel of this tree, byte for byte the same each time: dist.py FOLDER

The same tree with the same setuptools makes the same files, whenever and wherever: names are sorted, and all times are
that of the last commit (or SOURCE_DATE_EPOCH). What git ignores is left out. The wheel is made from the sdist.

The version is `ftcomm.__version__`; a tag v* on this commit has to be that. An index shows the README by itself, so its
links have to be absolute: --url names the repository they lead to, at the tag of the version.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def version() -> str:
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "ftcomm" / "__init__.py").read_text(), re.MULTILINE)
    assert found, "ftcomm/__init__.py has the version"
    return found[1]


def copy(to: Path) -> None:
    """Copy all files that git does not ignore."""
    for name in git("ls-files", "--cached", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
            (to / name).chmod(0o644)


def absolute(readme: str, base: str) -> str:
    """`readme` with links that lead to `base`, the repository at a tag. Without one, only their texts are left."""

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        if re.match(r"https?:|#", target):
            return match[0]
        if not base:
            return "" if image else text
        kind = "raw" if image else "blob"
        return f"{image}[{text}]({base.format(kind)}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", link, readme)


def same_each_time(sdist: Path, epoch: int) -> None:
    """Write the archive again, with sorted names, without the user, and with `epoch` as its only time."""
    with tarfile.open(sdist) as archive:
        members = sorted(archive.getmembers(), key=lambda member: member.name)
        contents = [archive.extractfile(member) if member.isfile() else None for member in members]
        again = sdist.with_suffix(".new")
        with (
            again.open("wb") as raw,
            gzip.GzipFile("", "wb", 9, raw, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as out,
        ):
            for member, content in zip(members, contents, strict=True):
                plain = tarfile.TarInfo(member.name)
                plain.type, plain.size, plain.mtime = member.type, member.size, epoch
                plain.mode = 0o755 if member.isdir() else 0o644
                out.addfile(plain, content)
    again.replace(sdist)


def setuptools(what: str, source: Path, out: Path, epoch: int) -> None:
    """Build in the environment of this interpreter, by the interface that pip calls."""
    call = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    command = [sys.executable, "-c", call, str(out)]
    subprocess.run(command, cwd=source, env=environment, check=True, stdout=subprocess.DEVNULL)


def build(out: Path, url: str) -> list[Path]:
    """Returns the sdist and the wheel in `out`."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or git("log", "-1", "--format=%ct"))
    os.umask(0o022)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree, made = Path(folder, "tree"), Path(folder, "made")
        copy(tree)
        readme = tree / "README.md"
        readme.write_text(absolute(readme.read_text(), f"{url.rstrip('/')}/{{}}/v{version()}" if url else ""))
        made.mkdir()
        setuptools("sdist", tree, made, epoch)
        (sdist,) = made.glob("*.tar.gz")
        same_each_time(sdist, epoch)
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        setuptools("wheel", Path(folder, sdist.name.removesuffix(".tar.gz")), made, epoch)
        (wheel,) = made.glob("*.whl")
        return [Path(shutil.copy(each, out)) for each in (sdist, wheel)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--url", default="", help="of the repository, as https://github.com/owner/name")
    parser.add_argument("--changed", action="store_true", help="also with changes that are not committed")
    args = parser.parse_args()
    if not args.changed and git("status", "--porcelain"):
        sys.exit("there are changes that are not committed, which no tag would name; commit them, or say --changed")
    tags = [tag for tag in git("tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    if tags and f"v{version()}" not in tags:
        sys.exit(f"this commit has the tag {', '.join(tags)}, and ftcomm.__version__ is {version()}; make them equal")
    print(*build(args.folder, args.url), sep="\n")


if __name__ == "__main__":
    main()
