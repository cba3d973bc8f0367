"""The layers of the package, lowest first: a module imports from lower layers or its own folder only.

Layer 2 and 3 have two halves that do not see each other, and neighbours of layer 2 do not see each other either.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "palingenesis"

LAYERS = {
    "errors": 0,
    "types": 0,
    "plugins": 0.5,
    "config": 1,
    "observe": 1,
    "data": 2,
    "chat": 2,
    "sandbox": 2,
    "objective": 2,
    "kernels": 2,
    "rewards": 3,
    "envs": 3,
    "engines": 3,
    "policy": 3,
    "rollout": 4,
    "trainer": 5,
    "evaluate": 6,
    "doctor": 6,
    "report": 6,
    "cli": 7,
}
ROLLOUT_HALF = {"data", "chat", "sandbox", "rewards", "envs", "rollout"}
POLICY_HALF = {"objective", "kernels", "policy"}
NO_TORCH = {"types", "errors", "plugins", "config", "observe"} | ROLLOUT_HALF
NO_ASYNC = POLICY_HALF


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py" or path.parent.name != "rl")


def part(path: Path) -> str:
    relative = path.relative_to(PACKAGE / "rl" if PACKAGE / "rl" in path.parents else PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every module a file imports, also inside functions, but for those under `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def own_parts(path: Path) -> set[str]:
    found = set()
    for name in imports(path):
        pieces = name.split(".")
        if pieces[0] == "palingenesis":
            found.add(
                pieces[2] if pieces[1:2] == ["rl"] and len(pieces) > 2 else (pieces[1] if len(pieces) > 1 else "")
            )
    return found - {"", "rl"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_from_below(path: Path) -> None:
    here = part(path)
    if here == "__init__":
        return
    assert here in LAYERS, f"{here} has no layer: add it to the table and to the design"
    for other in own_parts(path) - {here}:
        assert LAYERS[other] < LAYERS[here], f"{here} (layer {LAYERS[here]}) imports {other} (layer {LAYERS[other]})"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_halves_do_not_meet(path: Path) -> None:
    here = part(path)
    if here in ROLLOUT_HALF:
        assert not own_parts(path) & (POLICY_HALF | {"engines"})
    if here in POLICY_HALF:
        assert not own_parts(path) & (ROLLOUT_HALF | {"engines"})
    roots = {name.split(".")[0] for name in imports(path)}
    if here in NO_TORCH:
        assert "torch" not in roots
    if here in NO_ASYNC:
        assert not roots & {"asyncio", "threading", "concurrent"}


@pytest.mark.parametrize(
    "code",
    [
        "import palingenesis.rl",
        "from palingenesis.rl import RLConfig; RLConfig.from_yaml('configs/rl_math.yaml')",
        "from palingenesis.cli import run; assert run(['rl', '--help']) == 0",
        "import palingenesis.rl.data, palingenesis.rl.rewards, palingenesis.rl.rollout.collect",
    ],
)
def test_heavy_packages_are_not_loaded(code: str) -> None:
    check = f"import sys; {code}; bad = {{'torch', 'vllm', 'transformers'}} & set(sys.modules); assert not bad, bad"
    result = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, cwd=PACKAGE.parents[1], check=False
    )
    assert result.returncode == 0, result.stderr


def test_public_names() -> None:
    import palingenesis.rl

    assert palingenesis.rl.__all__ == ["RLConfig", "RLTrainer", "SkipSample"]
    for name in palingenesis.rl.__all__:
        assert getattr(palingenesis.rl, name).__name__ == name
