"""README and docs/ tell the truth: every block runs or says why not, and every name in them exists.

page ──> blocks, in order, in one scratch folder (configs/ and examples/ are there)
           python            runs; training is cut to one tiny step
           yaml              loads as a config, its rewards and loss are bound, its rows checked
           bash              `pgs` lines are parsed with their configs and overrides; <!-- output --> ones run
           json              parses
           text              is not code; below <!-- output --> it is what the command above prints
         a block with title="name" is written to that file first; <!-- not run: reason --> leaves one out
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from palingenesis import cli
from palingenesis.rl import RLConfig
from palingenesis.rl.config.builtin_rewards import BUILTIN_REWARDS
from palingenesis.rl.config.not_built import NOT_BUILT
from palingenesis.rl.config.schema import SECTIONS, find_field
from palingenesis.rl.data import build
from palingenesis.rl.observe.log import COLUMNS
from palingenesis.rl.rewards import BUILTIN, RewardSet
from palingenesis.rl.rewards.grading.run import Verdict
from palingenesis.rl.rewards.score import SANDBOX_COUNTS
from tests.e2e.test_run import METRICS

pytestmark = pytest.mark.filterwarnings("ignore:sandbox.backend is subprocess")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
ROWS = "examples/rl/data/addition/train.jsonl"
LANGUAGES = {"python", "yaml", "bash", "json", "text"}
NOT_PGS = {"pip", "mkdocs"}  # commands of others that a page may show
GPU_ONLY = {"mfu"}
ENV_ONLY = {"env/<name>"}
CODE_ONLY = {f"code/{verdict}" for verdict in Verdict} | {f"sandbox/{name}" for name in SANDBOX_COUNTS}


@dataclass(frozen=True)
class Block:
    """One fenced block; `above` is the line directly above its fence."""

    page: str
    line: int
    language: str
    title: str
    text: str
    above: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def not_run(self) -> str | None:
        """Why it does not run; None when it does."""
        found = re.fullmatch(r"<!-- not run: (.*) -->", self.above)
        return found[1] if found else None


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    at = 0
    while at < len(lines):
        fence = re.fullmatch(r"```(\w*)(.*)", lines[at])
        if fence:
            end = next(n for n in range(at + 1, len(lines)) if lines[n] == "```")
            title = re.search(r'title="([^"]+)"', fence[2])
            text = "\n".join(lines[at + 1 : end]) + "\n"
            above = lines[at - 1].strip() if at else ""
            found.append(Block(page.name, at + 1, fence[1], title[1] if title else "", text, above))
            at = end
        at += 1
    return found


def prose(page: Path) -> str:
    """The page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", prose(page))


def table_under(page: Path, heading: str) -> list[list[str]]:
    """Body rows of the first table below a heading."""
    below = prose(page).split(f"{heading}\n", 1)[1]
    lines = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert lines, f"{page.name}: no table under {heading!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()[2:]]


def names_in(cells: list[str]) -> set[str]:
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices on several threads of a busy machine wait for each other more than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


by_name = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


# ------------------------------------------------------------------------------------------------------------- blocks


def few_rows(dataset: Path, folder: Path, count: int = 200) -> str:
    """The head of a data set in a file of its own: counting the tokens of all rows takes a second a run."""
    target = folder / f"few_{dataset.name}"
    target.write_text("".join(dataset.read_text(encoding="utf-8").splitlines(keepends=True)[:count]), encoding="utf-8")
    return str(target)


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory like the repository's root, in which every training run is one tiny step."""
    from palingenesis.rl import trainer

    for name in ("configs", "examples", "scripts", "bench"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    real = trainer.RLTrainer.__init__

    def tiny(self: trainer.RLTrainer, config: RLConfig, rewards: Any = ()) -> None:
        assert config.model.policy == "builtin:tiny", "an example that runs trains the packaged policy"
        config.train.steps = 1
        config.rollout.batch_prompts, config.rollout.group_size, config.rollout.max_refill = 2, 4, 0.0
        if config.data.eval_dataset or config.data.eval_size:
            config.train.eval_samples = 4
        if config.data.eval_dataset:
            config.data.eval_dataset = few_rows(Path(config.data.eval_dataset), tmp_path, count=20)
        config.data.dataset = few_rows(Path(config.data.dataset), tmp_path)
        real(self, config, rewards)

    monkeypatch.setattr(trainer.RLTrainer, "__init__", tiny)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("pgs_file_")]:
        del sys.modules[name]


@by_name
def test_every_block_has_a_language_and_a_reason(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: no such language {block.language!r}"
        assert block.not_run is None or len(block.not_run) > 10, f"{block.place}: say why it does not run"


@by_name
def test_the_blocks_of_a_page_run(page: Path, scratch: Path) -> None:
    before: Block | None = None
    for block in blocks(page):
        try:
            if block.not_run is None:
                run_block(block, before)
        except BaseException as error:
            error.add_note(f"in the block at {block.place}")
            raise
        before = block


def run_block(block: Block, before: Block | None) -> None:
    if block.title:
        sys.modules.pop(Path(block.title).stem, None)  # another test may have imported a file of this name
        Path(block.title).write_text(block.text, encoding="utf-8")
    if block.language == "python":
        exec(compile(block.text, block.place, "exec"), {"__name__": "__main__"})
    elif block.language == "yaml":
        load_config(block)
    elif block.language == "json":
        for line in block.text.splitlines():
            json.loads(line)
    elif block.language == "bash":
        for line in block.text.splitlines():
            if words := shlex.split(line, comments=True):
                run_command(words)
    elif block.above == "<!-- output -->":
        assert before is not None
        assert before.language == "bash"
        assert printed(shlex.split(before.text)[1:]) == without_seconds(block.text)


def load_config(block: Block) -> None:
    sections = yaml.safe_load(block.text)
    assert set(sections) <= set(SECTIONS), f"sections {set(sections)}"
    path = Path(block.title or "fragment.yaml")
    path.write_text(block.text, encoding="utf-8")
    missing = [] if "model" in sections else ["--model.policy", "builtin:tiny"]
    missing += [] if "data" in sections else ["--data.dataset", few_rows(Path(ROWS), Path.cwd())]
    config = RLConfig.from_yaml(path, missing)
    rewards = RewardSet.from_config(config.rewards)
    try:
        if Path(config.data.dataset).is_file():
            rewards.check(build(config.data).rows)
    finally:
        rewards.close()
    if config.env.type != "single_turn":
        from palingenesis.rl.envs import build as build_environments

        assert build_environments(config.env).listing
    if ":" in config.loss.type:
        from palingenesis.rl.objective import build_loss

        assert build_loss(config.loss).level in ("token", "sequence")


def run_command(words: list[str]) -> None:
    """Check one line of a shell block as far as it goes without training."""
    program, *rest = words
    if program == "scripts/quickstart":
        program, rest = "pgs", ["rl", "--config", "configs/rl_quickstart.yaml", *rest]
    if program == "pgs":
        _, args, overrides = cli._parse(rest)
        if not getattr(args, "help", False):
            cli._config(args, overrides)
    elif program == "python" and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1]), f"no module {rest[1]}"
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), f"no file {rest[0]}"
    elif program not in NOT_PGS:
        assert os.access(ROOT / program, os.X_OK), f"what is {program}?"


def printed(argv: list[str]) -> str:
    """What a command prints, with seconds left out."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.run(argv) == 0
    return without_seconds(out.getvalue())


def without_seconds(text: str) -> str:
    lines = [re.sub(r"(%) +[0-9]+\.[0-9]{2}$", r"\1", line.rstrip()) for line in text.splitlines()]
    return "\n".join(lines).strip()


# -------------------------------------------------------------------------------------------------------------- names


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower())


@by_name
def test_links_and_images_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose(file), re.MULTILINE)}
            assert anchor in headings, f"{page.name} links to {target}; the headings are {sorted(headings)}"


@by_name
def test_options_exist(page: Path) -> None:
    option = re.compile(rf"(?<![\w./])(?:{'|'.join(SECTIONS)})(?:\.[A-Za-z_]\w*)+")
    for span in code_spans(page):
        for name in option.findall(span):
            if name.rpartition(".")[2] in ("md", "py", "json", "jsonl", "yaml"):
                continue
            assert find_field(name), f"{page.name}: there is no option {name}"


@by_name
def test_files_exist(page: Path) -> None:
    for span in code_spans(page):
        if re.fullmatch(r"(?:configs|examples|src|tests|bench|scripts)(?:/[\w.-]+)+", span):
            assert (ROOT / span).exists() or span.startswith("bench/results/"), f"{page.name}: no {span}"
        elif re.fullmatch(r"[a-z_]+(?:/[a-z_]+)+\.py", span):
            assert (ROOT / "src/palingenesis/rl" / span).exists(), f"{page.name}: no {span}"


def test_the_nav_names_every_page() -> None:
    def pages(entries: list[Any]) -> Iterator[str]:
        for entry in entries:
            (value,) = entry.values()
            yield from pages(value) if isinstance(value, list) else [value]

    nav = list(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]))
    assert sorted(nav) == sorted(page.name for page in DOCS.glob("*.md"))


def test_the_flags_of_every_command_are_documented() -> None:
    page = DOCS / "commands.md"
    spans = {word for span in code_spans(page) for word in span.split()}
    for name, (_, add_arguments, _) in cli.SUBCOMMANDS.items():
        parser = cli._Parser(add_help=False)
        add_arguments(parser)
        flags = {flag for action in parser._actions for flag in action.option_strings}
        assert flags <= spans, f"{name}: {flags - spans}"
        assert f"\n## {name}\n" in prose(page)


def test_the_built_in_rewards_are_documented() -> None:
    documented = names_in([row[0] for row in table_under(DOCS / "rewards.md", "## Built-ins")])
    assert documented == set(BUILTIN)
    judges = names_in([row[0] for row in table_under(DOCS / "rewards.md", "## Judges")])
    assert judges == set(BUILTIN_REWARDS["judge"].args)


def test_the_page_of_missing_parts_has_all_of_them() -> None:
    text = (DOCS / "roadmap.md").read_text(encoding="utf-8")
    for entry in NOT_BUILT:
        section, _, option = entry.option.rpartition(".")
        named = f"the `{section}` section" if option == "*" else "fn: code" if option == "fn" else entry.option
        assert named in text, f"roadmap.md does not name {entry.option}"
    patterns = {entry.option.replace("rewards.*.", "") for entry in NOT_BUILT}
    for name in names_in([row[1] for row in table_under(DOCS / "roadmap.md", "# Not built yet")]):
        option, colon, _ = name.partition(":")
        assert option in patterns or not (colon or "." in option), f"roadmap.md names {option}, which is built"


def test_the_readme_has_its_figures_once_they_are_measured() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- figures: quickstart -->" in readme
    if (ROOT / "bench/results/quickstart.json").exists():
        assert "FILLED_LATER" not in readme


# ---------------------------------------------------------------------------------------------------- what a run writes


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of the packaged policy that writes everything there is."""
    from palingenesis.rl import RLTrainer

    folder = tmp_path_factory.mktemp("docs") / "run"
    overrides = {
        "data.dataset": few_rows(ROOT / ROWS, folder.parent),
        "data.eval_dataset": few_rows(ROOT / ROWS.replace("train", "heldout"), folder.parent, count=20),
        "train.output_dir": folder,
        "train.steps": 2,
        "train.eval_samples": 2,
        "train.save_steps": 1,
        "train.eval_every": 1,
        "rollout.batch_prompts": 4,
        "rollout.group_size": 8,
        "rollout.max_refill": 1,
        "logging.dump_trajectories": 1,
    }
    flags = [f"--{option}={value}" for option, value in overrides.items()]
    config = RLConfig.from_yaml(ROOT / "configs/rl_quickstart.yaml", flags)
    RLTrainer(config).train()
    return folder


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_metrics_are_those_of_a_run(run_folder: Path) -> None:
    written = set().union(*logged(run_folder / "metrics.jsonl")) - {"step", "time"}
    documented = names_in([row[0] for row in table_under(DOCS / "training.md", "### Metrics")])
    one_reward = {"rewards/correct" if name == "rewards/<name>" else name for name in documented}
    assert one_reward - GPU_ONLY == (written | CODE_ONLY | ENV_ONLY) - GPU_ONLY
    assert one_reward >= METRICS


def test_metrics_named_elsewhere_exist(run_folder: Path) -> None:
    metric = re.compile(r"(?:policy|groups|engine|tokens|time|length)/\w+")
    written = set().union(*logged(run_folder / "metrics.jsonl"))
    for page in PAGES:
        for span in code_spans(page):
            assert not metric.fullmatch(span) or span in written, f"{page.name}: there is no metric {span}"
    for _, name, _ in table_under(DOCS / "quickstart.md", "## What it prints"):
        assert names_in([name]) <= {metric for _, metric, _, _ in COLUMNS}


def test_the_files_and_fields_are_those_of_a_run(run_folder: Path) -> None:
    page = DOCS / "training.md"
    of_some_runs = {"stalled.txt", "failures.jsonl"}
    files = names_in([row[0] for row in table_under(page, "## What a run writes")]) - of_some_runs
    assert {name.replace("<n>", "1").rstrip("/").split("/")[0] for name in files} == {
        path.name for path in run_folder.iterdir()
    }
    rollouts = [line for line in logged(run_folder / "rollouts/step_1.jsonl") if line["kind"] == "rollout"]
    documented = names_in([row[0] for row in table_under(page, "### Rollout dumps")])
    written = set().union(*rollouts) - {"kind"}
    assert written <= documented <= written | {"skip_reason", "mask_reason"}
    (evals,) = [row[1] for row in table_under(page, "## What a run writes") if row[0] == "`eval.jsonl`"]
    fields = {"rewards/correct" if name == "rewards/<name>" else name for name in names_in([evals])}
    assert fields == set(logged(run_folder / "eval.jsonl")[0])


def test_the_picture_of_a_run_is_well_formed(run_folder: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("bench_picture", ROOT / "bench/picture.py")
    assert spec
    assert spec.loader
    picture = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = picture
    spec.loader.exec_module(picture)
    target = tmp_path / "images" / "run.svg"
    assert picture.main([str(run_folder), str(target)]) == 0
    for svg in (target, DOCS / "images/quickstart.svg"):
        texts = [element.text for element in ET.parse(svg).iter() if element.tag.endswith("text")]
        assert "optimizer step" in texts
        assert "reward" in texts
    assert picture.main([str(tmp_path), str(target)]) == 1
