"""Package metadata of hvd_sparse; tools are configured in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """The version in hvd_sparse/__init__.py, read and not imported: the package need not be importable to be packed."""
    text = (ROOT / "hvd_sparse" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("hvd_sparse/__init__.py has no line __version__ = ...")
    return found.group(1)


def long_description() -> str:
    """The README, where there is one."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


PLOT = ["matplotlib>=3.7"]
TEST = ["hypothesis>=6.100", "mypy>=1.11", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "ruff>=0.6", *PLOT]

setup(
    name="hvd-sparse",
    version=version(),
    description="Sparse and compressed gradient exchange with error feedback for Horovod",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="deep learning, distributed training, horovod, gradient compression, sparsification, error feedback",
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["hvd_sparse", "hvd_sparse.*"]),
    package_data={"hvd_sparse": ["py.typed", "*.md"]},
    python_requires=">=3.9",
    # Horovod is not listed: pip cannot build its release beside current frameworks, `hvd-sparse build-horovod` can.
    install_requires=["numpy>=1.22", "tqdm>=4.60"],
    extras_require={
        "torch": ["torch>=2.1"],
        "tensorflow": ["tensorflow>=2.16"],
        "gnn": ["torch>=2.1", "torch-geometric>=2.5", "pymetis>=2025.2", "scipy>=1.9"],
        "plot": PLOT,
        "test": TEST,
        "dev": [*TEST, "pre-commit>=3.5"],
    },
    entry_points={"console_scripts": ["hvd-sparse = hvd_sparse.cli:main"]},
    zip_safe=False,
)
