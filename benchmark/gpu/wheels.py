"""Downloads the wheels of wheels.txt into .whl, and prints what they and the files of the repository weigh together.

    python benchmark/gpu/wheels.py all minatar mujoco peers

Without a network they are installed by:

    python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/site .whl/*.whl
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 64 * 2**20  # bytes that can be carried
PLATFORMS = [f"manylinux_2_{number}_x86_64" for number in (28, 27, 17)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]


def wheels():
    """Set, package and version, patterns of what is kept, of each line."""
    lines = (Path(__file__).parent / "wheels.txt").read_text().splitlines()
    for name, package, *kept in (line.split() for line in lines if line and not line.startswith("#")):
        yield name, package, kept


def keep(source, target, patterns):
    """A wheel with the files that one of the patterns fits; RECORD names no others, and of EnvPool's families only
    Atari is registered."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for entry in old.infolist():
            if any(fnmatch(entry.filename, pattern) for pattern in patterns):
                data = old.read(entry)
                if entry.filename.endswith("/RECORD"):
                    lines = data.decode().splitlines(keepends=True)
                    data = "".join(line for line in lines if any(fnmatch(line.split(",")[0], p) for p in patterns))
                if entry.filename == "envpool/entry.py":
                    lines = data.decode().splitlines(keepends=True)
                    data = "".join(line for line in lines if "import" not in line or ".atari." in line)
                new.writestr(entry, data)


def download(package, kept, folder):
    """The wheel of `package` for Python 3.12, in the folder."""
    with tempfile.TemporaryDirectory() as temporary:
        words = ["download", "-q", "--no-deps", "--only-binary=:all:", "--python-version", "3.12"]
        words += ["--implementation", "cp", *(word for name in PLATFORMS for word in ("--platform", name))]
        subprocess.run([sys.executable, "-m", "pip", *words, "-d", temporary, package], check=True)
        [wheel] = Path(temporary).glob("*.whl")
        if kept:
            keep(wheel, folder / wheel.name, kept)
        else:
            shutil.copy(wheel, folder)
        return folder / wheel.name


def main():
    names = list(dict.fromkeys(name for name, _, _ in wheels()))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="+", choices=names)
    parser.add_argument("--out", type=Path, default=ROOT / ".whl")
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    for old in args.out.glob("*.whl"):
        old.unlink()
    for name, package, kept in wheels():
        if name in args.sets:
            wheel = download(package, kept, args.out)
            print(f"{wheel.stat().st_size:>12,} {name:8} {wheel.name}")
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    tree = sum((ROOT / name).stat().st_size for name in tracked if name and (ROOT / name).is_file())
    carried = sum(file.stat().st_size for file in args.out.iterdir())
    print(f"{carried:>12,} wheels\n{tree:>12,} files of the repository\n{carried + tree:>12,} of {LIMIT:,}")
    sys.exit(carried + tree > LIMIT)


if __name__ == "__main__":
    main()
