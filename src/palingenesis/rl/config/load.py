"""Read a config: a YAML file and `--section.option value` overrides become an RLConfig that knows where each came from.

    bytes ─> YAML nodes (with line marks) ─┬─> places: option -> "file:line"
                                           └─> plain values ─┐
    --a.b v ─────────────────────────────────────────────────┴─> OmegaConf: merged, ${...} resolved ─> RLConfig ─> check

Values are read by YAML 1.2's core rules: `1e-6` is a number, `off` and `1:30` are texts, a key given twice is an error.
What the schema declares a text stays one: `data.split: 2024` is "2024". On the command line it is taken as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from palingenesis.rl.config.check import check
from palingenesis.rl.config.schema import SECTIONS, RLConfig, find_field, unknown
from palingenesis.rl.config.values import OptionError, expects, kind_of, show
from palingenesis.rl.errors import ConfigError

COMMAND_LINE = "command line"
STR, NULL, MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null", "tag:yaml.org,2002:merge"
READ_AS_TEXT = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:int", "tag:yaml.org,2002:float")

Config = TypeVar("Config", bound=RLConfig)


def from_yaml(cls: type[Config], path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """What `RLConfig.from_yaml` does."""
    if isinstance(overrides, str | Mapping):
        raise ConfigError('overrides are a list of command-line words, such as ["--train.steps", "60"].')
    root = _compose(_read(Path(path)), str(path))
    if root is None:
        raise ConfigError(f"{path}: is empty; a config has sections such as model: and data:")
    places = _Places()
    tree = _Reader(str(path), places).read(root)
    given = [_parse_override(option, text) for option, text in split_overrides(overrides)]
    for option, _ in given:
        places.command_line(option)
    values = _resolve(tree, given, str(path), places)
    try:
        config = cls(**values)
    except OptionError as error:
        raise OptionError(error.option, error.problem, places.of(error.option) or str(path)) from None
    config._origins = {
        option: (places.of(option), value) for option, value, _ in config.options() if config.is_set(option)
    }
    check(config)
    return config


class _Places:
    """Where each path of the tree was set; a question about a path inside an option is answered for the option."""

    def __init__(self) -> None:
        self.exact: dict[str, str] = {}

    def command_line(self, option: str) -> None:
        """Note an override: its own path, and what it sets a part of, unless the file set that one too."""
        parts = option.split(".")
        for inner in [known for known in self.exact if known.startswith(f"{option}.")]:
            del self.exact[inner]
        for depth in range(1, len(parts)):
            self.exact.setdefault(".".join(parts[:depth]), COMMAND_LINE)
        self.exact[option] = COMMAND_LINE

    def of(self, option: str) -> str:
        parts = re.split(r"[.\[]", option)
        for depth in range(len(parts), 0, -1):
            if place := self.exact.get(".".join(parts[:depth])):
                return place
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory; name the YAML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Loader(yaml.SafeLoader):
    """YAML with the core rules of version 1.2 for plain scalars, and merge keys."""


_Loader.yaml_implicit_resolvers = {}

_DIGITS = list("0123456789")
_RULES: tuple[tuple[str, str, list[str]], ...] = (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+") + _DIGITS),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.") + _DIGITS,
    ),
    ("merge", r"<<", ["<"]),
)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either version of YAML would read as something else; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Unicode line breaks survive only between double quotes."""
    breaks = any(sign in text for sign in "\x85\u2028\u2029\ufeff")
    return dumper.represent_scalar(STR, text, style='"' if breaks else None)


_Dumper.add_representer(str, _represent_text)

for _name, _pattern, _first in _RULES:
    _compiled = re.compile(f"(?:{_pattern})\\Z")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _compiled, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _compiled, _first)


def _compose(text: str, source: str) -> yaml.Node | None:
    loader = None
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax(error, source) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: is not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        if loader is not None:
            loader.dispose()


def _line(source: str, mark: Any) -> str:
    """`file:line`; on the command line the option itself is the place."""
    return source if source.startswith(COMMAND_LINE) else f"{source}:{mark.line + 1}"


def _syntax(error: yaml.MarkedYAMLError, source: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    place = source if mark is None else _line(source, mark)
    what = ", ".join(part for part in (error.context, error.problem) if part)
    return ConfigError(f"{place}: is not valid YAML: {' '.join(what.split())}")


class _Reader:
    """Turns nodes into plain values, notes the line of each, and keeps texts texts."""

    def __init__(self, source: str, places: _Places) -> None:
        self.source = source
        self.places = places
        self.loader = _Loader("")

    def read(self, root: yaml.Node) -> dict[str, Any]:
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{self._line(root)}: a config is a mapping of sections such as model: and data:")
        self.walk(root, "", set())
        return dict(self.construct(root))

    def construct(self, node: yaml.Node) -> Any:
        try:
            return self.loader.construct_document(node)
        except yaml.MarkedYAMLError as error:
            raise _syntax(error, self.source) from None
        except ValueError as error:
            raise ConfigError(f"{self.source}: is not valid YAML: {error}") from None

    def _line(self, node: yaml.Node) -> str:
        return _line(self.source, node.start_mark)

    def walk(self, node: yaml.Node, path: str, above: set[int]) -> None:
        if id(node) in above:
            raise ConfigError(f"{self._line(node)}: {path}: the anchor refers to itself")
        above = above | {id(node)}
        if isinstance(node, yaml.MappingNode):
            self._refuse_duplicates(node, path)
            try:
                self.loader.flatten_mapping(node)
            except yaml.MarkedYAMLError as error:
                raise _syntax(error, self.source) from None
            for key, value in node.value:
                name = self._key(key, path)
                inner = f"{path}.{name}" if path else name
                self.places.exact[inner] = self._line(key)
                self.walk(value, inner, above)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.walk(item, path, above)
        elif node.tag in READ_AS_TEXT and is_text(path):
            node.tag = STR

    def _key(self, key: yaml.Node, path: str) -> str:
        if not isinstance(key, yaml.ScalarNode) or key.tag == NULL:
            raise ConfigError(f"{self._line(key)}: {path + ': ' if path else ''}a key must be a word")
        if find_field(path) is None:
            key.tag = STR  # names of sections, options and rewards; keys inside a mapping option keep their type
        return str(key.value)

    def _refuse_duplicates(self, node: yaml.MappingNode, path: str) -> None:
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == MERGE:
                continue
            name = str(key.value)
            if name in seen:
                option = f"{path}.{name}" if path else name
                first = seen[name].start_mark.line + 1
                raise OptionError(option, f"is set twice, first on line {first}; remove one", self._line(key))
            seen[name] = key


def is_text(option: str) -> bool:
    """The schema declares a text, a list of texts or a choice among words at this very path."""
    field = find_field(option)
    whole = len(option.split(".")) == (3 if option.startswith("rewards.") else 2)
    return field is not None and whole and kind_of(field) in ("text", "texts", "choice")


def split_overrides(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """`--a.b v` and `--a.b=v` as `("a.b", "v")`. A value may start with one dash (`-1`), after `=` with anything."""
    rest = iter(range(len(tokens)))
    for index in rest:
        token = tokens[index]
        if not token.startswith("--") or token == "--":
            raise ConfigError(f"{COMMAND_LINE}: {show(token)} stands alone; write --section.option value")
        option, equals, value = token[2:].partition("=")
        if not equals:
            following = tokens[index + 1] if index + 1 < len(tokens) else "--"
            if following.startswith("--"):
                _known_override(option)
                raise OptionError(option, f"has no value; write --{option} VALUE", COMMAND_LINE)
            value = following
            next(rest)
        yield option, value


def _known_override(option: str) -> None:
    """Refuse a flag that names no option, or a whole section."""
    parts = option.split(".")
    if "" in parts:
        raise OptionError(f"--{option}", "overrides are written --section.option value", COMMAND_LINE)
    if option in SECTIONS:
        example = f"{option}.{'NAME.' if option == 'rewards' else ''}{next(iter(SECTIONS[option].model_fields))}"
        raise OptionError(option, f"is a section; set its options one by one, such as --{example}", COMMAND_LINE)
    if parts[0] == "rewards" and len(parts) == 2:
        return
    field = find_field(option)
    if field is None:
        raise OptionError(option, unknown(tuple(parts)), COMMAND_LINE)
    depth = 3 if parts[0] == "rewards" else 2
    if len(parts) > depth and kind_of(field) != "mapping":
        whole = ".".join(parts[:depth])
        raise OptionError(option, f"{whole} has no parts, it must be {expects(field)}", COMMAND_LINE)


def _parse_override(option: str, text: str) -> tuple[str, Any]:
    _known_override(option)
    field = find_field(option)
    if field is not None and is_text(option) and kind_of(field) != "texts":
        return option, text
    node = _compose(text, f"{COMMAND_LINE}: {option}")
    if node is None:
        raise OptionError(option, f"has no value; write --{option} VALUE", COMMAND_LINE)
    reader = _Reader(f"{COMMAND_LINE}: {option}", _Places())
    reader.walk(node, option, set())
    return option, reader.construct(node)


def _resolve(tree: dict[str, Any], given: Sequence[tuple[str, Any]], source: str, places: _Places) -> dict[str, Any]:
    """Merge the overrides and replace `${oc.env:NAME}` and `${section.option}`."""
    try:
        config = OmegaConf.create({key: {} if value is None else value for key, value in tree.items()})
        for option, value in given:
            _refuse_lone_parent(tree, option, places)
            OmegaConf.update(config, option, value, merge=False, force_add=True)
        resolved = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        option = str(getattr(error, "full_key", None) or "")
        problem = str(error).splitlines()[0].rpartition("resolving interpolation: ")[2]
        cure = "set it, or write \\${ where a literal ${ is meant"
        raise OptionError(
            option, f"${{...}} cannot be filled in: {problem}; {cure}", places.of(option) or source
        ) from None
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def _refuse_lone_parent(tree: Mapping[str, Any], option: str, places: _Places) -> None:
    """The file gives a plain value to something that `option` is a part of."""
    held: Any = tree
    parents = option.split(".")[:-1]
    for depth, name in enumerate(parents):
        held = held.get(name)
        if held is None:
            return
        if not isinstance(held, Mapping):
            parent = ".".join(parents[: depth + 1])
            raise OptionError(parent, f"is {show(held)}, so --{option} cannot be set in it", places.of(parent))


def dump(config: RLConfig, header: Mapping[str, str]) -> str:
    """What `RLConfig.dump` does."""
    values = config.to_dict()
    if not config.is_set("rollout.backend"):
        del values["rollout"]["backend"]
    comments = "".join(f"# {key}: {' '.join(str(value).split())}\n" for key, value in header.items())
    body = yaml.dump(_escape(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return comments + body


def _escape(value: Any) -> Any:
    """Write `${` so that OmegaConf reads it as text again, and refuse what YAML has no plain form for."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + "\\${", value)
    if isinstance(value, dict):
        return {key: _escape(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_escape(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ConfigError(f"the config cannot be written as YAML: {show(value)} in args is not a plain value")
