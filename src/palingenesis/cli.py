"""The command line: `pgs rl` and its subcommands, also installed as `palingenesis`.

    pgs rl --config C [--section.option value ...]                 train
    pgs rl score --config C --completions F.jsonl [--out G.jsonl]  score completions offline
    pgs rl data --config C [--show N] [--json] [--tokens]          look at the rows
    pgs rl eval --config C [--policy DIR]                          held-out evaluation

Exit codes: 0 done, 1 failed with one message, 2 usage, 75 stopped on a signal after saving, 130 interrupted. A traceback
means a defect of ours. Heavy modules are imported by the command that needs them.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from palingenesis import __version__
from palingenesis.rl.errors import UsageError
from palingenesis.rl.observe.exits import exit_code, leave
from palingenesis.rl.plugins import nearest

Command = Callable[[argparse.Namespace, list[str]], None]


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    # The place in the code tells a user nothing.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    leave(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run a command; returns its exit code."""

    def work() -> None:
        command, args, overrides = _parse(list(argv))
        command(args, overrides)

    return exit_code(work)


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help shows the usage)")


def _parse(argv: list[str]) -> tuple[Command, argparse.Namespace, list[str]]:
    """The command, its own arguments, and what is left over: the config's overrides."""
    top = _Parser(prog="pgs", description="Train language models.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"palingenesis {__version__}")
    top.add_argument("area", choices=["rl"], help="rl: reinforcement learning against rewards")
    if argv and argv[0] not in ("rl", "-h", "--help", "--version"):
        raise UsageError(f"pgs has no command {argv[0]!r}; there is rl (pgs rl --help)")
    if not argv:
        raise UsageError("pgs needs a command; there is rl (pgs rl --help)")
    top.parse_args(argv[:1])
    # By hand: an argparse parser with subcommands would take an override's value for one.
    name = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else ""
    if name and name not in SUBCOMMANDS:
        known = f"{', '.join(SUBCOMMANDS)}, or none to train"
        raise UsageError(f"pgs rl has no subcommand {name!r}{nearest(name, SUBCOMMANDS)}; there are {known}")
    command, add_arguments, text = SUBCOMMANDS[name] if name else (_train, _train_arguments, "")
    parser = _Parser(prog=f"pgs rl {name}".strip(), description=text, allow_abbrev=False, add_help=bool(name))
    parser.add_argument("--config", metavar="FILE", help="the run's YAML file")
    add_arguments(parser)
    args, overrides = parser.parse_known_args(argv[2:] if name else argv[1:])
    return command, args, overrides


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-h", "--help", action="store_true")


def _score_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--completions", metavar="FILE", help="rows with `completion` or `messages`")
    parser.add_argument("--gold", metavar="COLUMN", help="score this column of data.dataset instead of completions")
    parser.add_argument("--out", metavar="FILE", help="write the scored rows here")


def _data_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--show", type=int, metavar="N", help="rows to show (default 3; with --json all)")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--tokens", action="store_true", help="count tokens (loads the policy's tokenizer)")


def _eval_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", metavar="DIR", help="the policy to evaluate (default: model.policy)")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="rollouts of each row (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _config(args: argparse.Namespace, overrides: list[str]) -> Any:
    from palingenesis.rl.config import RLConfig

    if not args.config:
        raise UsageError("--config FILE is missing (configs/rl_quickstart.yaml is one to start from)")
    return RLConfig.from_yaml(args.config, overrides)


_HELP = """\
usage: pgs rl --config FILE [--section.option value ...]     train
       pgs rl score --config FILE --completions ROWS         score completions offline
       pgs rl data --config FILE                             look at the rows
       pgs rl eval --config FILE [--policy DIR]              evaluate on the held-out rows
       (pgs rl score --help and so on show their own arguments)

"""


def _train(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.help:
        from palingenesis.rl.config.docs import help_text

        print(_HELP + help_text())
        return
    config = _config(args, overrides)
    from palingenesis.rl.trainer import RLTrainer

    RLTrainer(config).train()


def _score(args: argparse.Namespace, overrides: list[str]) -> None:
    if bool(args.completions) == bool(args.gold):
        raise UsageError("score takes either --completions FILE or --gold COLUMN")
    if args.out and args.completions and Path(args.out).resolve() == Path(args.completions).resolve():
        raise UsageError(f"--out {args.out}: would overwrite the completions; name another file")
    config = _config(args, overrides)
    from palingenesis.rl.rewards.offline import score_file

    score_file(config, completions=args.completions, gold=args.gold, out=args.out)


def _data(args: argparse.Namespace, overrides: list[str]) -> None:
    if args.show is not None and args.show < 0:
        raise UsageError(f"--show {args.show}: a number of rows is at least 0")
    config = _config(args, overrides)
    from palingenesis.rl.data.show import show_data
    from palingenesis.rl.rollout.prompts import shown_tools

    listed, notices = _environment_tools(config)
    show_data(
        config,
        count=args.show,
        as_json=args.json,
        count_tokens=_token_counter(config, listed) if args.tokens else None,
        tools_of=lambda row: shown_tools(row, listed),
        notices=notices,
    )


def _environment_tools(config: Any) -> tuple[Any, tuple[str, ...]]:
    """`Environments.schemas` of the config's environment, without a sandbox or an episode, and what to say of them."""
    from palingenesis.rl.envs import build

    if config.env.type == "single_turn":
        return (), ()
    environments = build(config.env)
    if environments.schemas is None:
        return None, (f"{environments.listing}: they are neither shown nor counted here.",)
    return environments.schemas, ()


def _token_counter(config: Any, listed: Any) -> Callable[[Any], int]:
    """Tokens of a row's prompt as a run measures it."""
    from palingenesis.rl.chat.template import ChatTemplate, load_tokenizer
    from palingenesis.rl.policy.model import policy_path
    from palingenesis.rl.rollout.prompts import Prompts, shown_tools

    template = ChatTemplate(load_tokenizer(policy_path(config.model.policy)), config.model.chat_template_kwargs)
    prompts = Prompts(template, config.env.tool_parser)
    return lambda row: len(prompts.render(row, shown_tools(row, listed)).ids)


def _eval(args: argparse.Namespace, overrides: list[str]) -> None:
    config = _config(args, overrides)
    from palingenesis.rl.evaluate import evaluate, table

    report = evaluate(config, policy=args.policy or config.model.policy, samples=args.samples)
    print(json.dumps(report) if args.json else table(report, Path(args.policy or config.model.policy)))


SUBCOMMANDS: dict[str, tuple[Command, Callable[[argparse.ArgumentParser], None], str]] = {
    "score": (_score, _score_arguments, "Score completions with the config's rewards; loads no model."),
    "data": (_data, _data_arguments, "Show the rows as the policy will meet them; loads no model."),
    "eval": (_eval, _eval_arguments, "Evaluate a policy on the held-out rows."),
}


if __name__ == "__main__":
    main()
