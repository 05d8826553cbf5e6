"""Environments of the peers, one each: ``python -m benchmarks.peers.environments`` makes those that are missing."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_FOLDER = ROOT / ".bench-peers"
FOLDER_VARIABLE = "CACHELOADER_BENCH_PEERS"
_MADE = "made"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What one peer needs.

    Attributes:
        name: Of the peer; the environment's folder.
        packages: For the resolver, beside torch.
        bare: Packages to install without what they depend on.
        stand_ins: Empty modules to provide: path below site-packages → content.
    """

    name: str
    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    stand_ins: tuple[tuple[str, str], ...] = ()

    @property
    def python(self) -> Path:
        """Its interpreter, whether it exists or not."""
        return folder() / self.name / "bin" / "python"

    @property
    def is_made(self) -> bool:
        """Whether it is complete."""
        return (folder() / self.name / _MADE).exists()


# mosaicml-streaming imports torchvision for classes that a benchmark of raw bytes never uses, and every torchvision
# that pip finds brings a CUDA build of torch of several GB: it gets the three names instead.
_TORCHVISION = (
    ("torchvision/__init__.py", "from . import datasets, transforms\n"),
    ("torchvision/datasets/__init__.py", "class VisionDataset: pass\n"),
    ("torchvision/transforms/__init__.py", "from . import functional\nclass ToTensor: pass\n"),
    ("torchvision/transforms/functional.py", "def to_tensor(image): raise NotImplementedError\n"),
)

ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment(
            name="streaming",
            packages=(
                "numpy<2.2", "boto3", "xxhash", "zstd", "brotli", "python-snappy", "catalogue", "tqdm", "pillow",
                "matplotlib", "paramiko", "google-cloud-storage", "oci", "azure-storage-blob",
                "azure-storage-file-datalake", "azure-identity", "transformers<5",
            ),
            bare=("mosaicml-streaming==0.13.0",),
            stand_ins=_TORCHVISION,
        ),
        Environment(name="litdata", packages=("litdata==0.2.76", "numpy", "pillow")),
        Environment(name="s3torchconnector", packages=("s3torchconnector==1.5.0",)),
        Environment(name="hf_datasets", packages=("datasets==5.2.0", "aiohttp", "botocore", "webdataset")),
        Environment(name="energon", packages=("megatron-energon[s3]==7.4.1",)),
    )
}  # fmt: skip


def folder() -> Path:
    """Where the environments lie: ``CACHELOADER_BENCH_PEERS``, else ``.bench-peers`` in the repository."""
    return Path(os.environ.get(FOLDER_VARIABLE) or DEFAULT_FOLDER)


def make(environment: Environment) -> None:
    """Make one with uv, torch pinned as for development.

    Raises:
        subprocess.CalledProcessError: It could not be installed.
    """
    home = folder() / environment.name
    shutil.rmtree(home, ignore_errors=True)
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, str(home)], check=True)
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    install = [*uv, "pip", "install", "--quiet", "--python", str(environment.python)]
    if links := os.environ.get("PIP_FIND_LINKS"):
        install += ["--find-links", links]
    subprocess.run([*install, *pins, *environment.packages], check=True)
    if environment.bare:
        subprocess.run([*install, "--no-deps", *environment.bare], check=True)
    [packages] = home.glob("lib/python*/site-packages")
    for path, text in environment.stand_ins:
        (packages / path).parent.mkdir(parents=True, exist_ok=True)
        (packages / path).write_text(text)
    (home / _MADE).touch()


def main() -> int:
    """Command line; 1 if one of them could not be made, which does not keep the others from being made."""
    parser = argparse.ArgumentParser(description="Make the environments of the peers that are missing.")
    parser.add_argument("names", nargs="*", metavar="PEER", help=f"some of: {', '.join(ENVIRONMENTS)} (default: all)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(ENVIRONMENTS):
        parser.error(f"no peer is called {', '.join(sorted(unknown))}; there are {', '.join(ENVIRONMENTS)}")
    failed = []
    for name in options.names or ENVIRONMENTS:
        if ENVIRONMENTS[name].is_made:
            continue
        print(f"making {folder() / name}", flush=True)
        try:
            make(ENVIRONMENTS[name])
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
