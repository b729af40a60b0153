"""The wheel as a user gets it: built from the checkout, installed elsewhere, without the checkout in sight."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("src", "pyproject.toml", "README.md", "LICENSE")


def run(*command, cwd, **environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "SAMEBITS"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean | environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that no build folder is left behind and none is picked up."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif source.exists():
            shutil.copy(source, tree / name)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tree / "dist", cwd=tree)
    (built,) = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """The interpreter of a clean environment: this wheel, and from here only the dependencies, torch above all."""
    home = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", home, cwd=home)
    interpreter = home / "bin" / "python"
    run(interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    (packages,) = home.glob("lib/python*/site-packages")
    # links rather than a path entry: the CUDA libraries are looked for in site-packages itself, and neither .pth files
    # nor an editable samebits may come along
    for entry in Path(pytest.__file__).resolve().parents[1].iterdir():
        ours = "samebits" in entry.name or entry.suffix == ".pth"
        if not ours and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return interpreter


def test_name_says_pure_python(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")


def test_everything_that_runs_is_inside(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    package = ROOT / "src" / "samebits"
    wanted = {
        str(path.relative_to(ROOT / "src"))
        for pattern in (
            "*.py",
            "*.cu",
            "*.cuh",
            "*.md",
            "manifest.json",
            "*.xz",
            "*.cpp",
            "*.h",
            "templates/*",
            "py.typed",
        )
        for path in package.rglob(pattern)
        if path.is_file()
    }
    assert wanted - inside == set()
    assert any(name.endswith(".cu") for name in wanted)
    assert any(name.endswith(".cuh") for name in wanted)
    assert "samebits/exact/special_sm_90.xz" in wanted
    assert "samebits/report/templates/index.html.j2" in wanted
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert not any(name.startswith("tests") for name in inside)


def test_runs_away_from_the_checkout(python, tmp_path):
    program = (
        "import samebits, torch; print(samebits.__file__);"
        "pre = torch.rand(3, 4); streams = torch.randn(3, 4, 64).bfloat16();"
        "print(samebits.h_aggregate(pre, streams, backend='reference').shape)"
    )
    told = run(python, "-c", program, cwd=tmp_path).splitlines()
    assert Path(told[0]).is_relative_to(python.parents[1])
    assert told[1] == "torch.Size([3, 64])"


def test_kernels_compile_from_the_wheel(python, tmp_path):
    program = (
        "from samebits import registry; from samebits.audit import compile as c;"
        "build = registry.operator('h_aggregate').backend('cuda').builds()[0];"
        "print(len(c.compile_build(build, 'sm_90').cubin) > 0)"
    )
    assert run(python, "-c", program, cwd=tmp_path, XDG_CACHE_HOME=str(tmp_path)).strip() == "True"


def test_the_command_is_there(python, tmp_path):
    listed = run(python.parent / "samebits", "list", cwd=tmp_path)
    assert "h_aggregate" in listed
    assert "rmsnorm_residual" in listed
    assert "error: " not in listed


def test_the_version_is_the_packages_own(wheel):
    import samebits

    assert f"-{samebits.__version__}-" in wheel.name
