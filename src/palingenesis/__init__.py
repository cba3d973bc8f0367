"""palingenesis: reinforcement learning of language models against rewards."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("palingenesis")
except PackageNotFoundError:  # a source tree on PYTHONPATH that was never installed
    __version__ = "0+source"

__all__ = ["__version__"]
