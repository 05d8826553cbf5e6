import subprocess
import sys

import pytest


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    return set(done.stdout.split())


ENGINES = {"obstore", "fsspec", "s3fs", "aiobotocore", "botocore", "aiofiles", "uvloop"}


@pytest.mark.parametrize(
    "statement",
    ["import cacheloader", "import cacheloader.cli", "import cacheloader_daemon.app, cacheloader_daemon.cli"],
)
def test_neither_the_bare_package_nor_the_command_line_nor_the_daemon_loads_torch(statement: str) -> None:
    assert "torch" not in modules_after(statement)


def test_a_training_process_loads_no_engine_and_no_daemon() -> None:
    loaded = modules_after("import cacheloader as cl; cl.RemoteDataset; cl.DataLoader")
    assert "torch" in loaded
    assert not {name for name in loaded if name.split(".")[0] in ENGINES or name.startswith("cacheloader_daemon")}
    assert not {name for name in loaded if name.startswith("cacheloader.origin.")} - {"cacheloader.origin.base"}


def test_public_names_are_exactly_what_the_package_exposes() -> None:
    import cacheloader

    for name in cacheloader.__all__:
        assert getattr(cacheloader, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        cacheloader.nonsense  # noqa: B018


def test_what_the_goodput_guide_names_is_there_after_one_import_and_brings_no_torch() -> None:
    loaded = modules_after("import cacheloader as cl; cl.goodput.export.TensorBoard; cl.goodput.recorder.ckpt_commit")
    assert "cacheloader.goodput.export.tensorboard" in loaded
    assert "torch" not in loaded
