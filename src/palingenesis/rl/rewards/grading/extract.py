"""Find the program in an answer, the code in a prompt, and put the two together.

    completion ──answer_block──> answer ──┐
    prompt ──────prompt_code──> code ─────┴─complete──> the program that runs

Fences are CommonMark's: a closing fence has the opening one's character, is at least as long and is indented by at most
three more columns, so a fence quoted inside a docstring closes nothing.

Invariant: text of the policy is never parsed as Python here. CPython's parser can be crashed by deep nesting, and this
is the trainer's process; regular expressions over lines are enough.
"""

from __future__ import annotations

import ast
import re
import textwrap
import threading
from collections.abc import Iterator

PYTHON_TAGS = frozenset({"python", "py", "python3"})
ROW = "<row>"  # the file name under which code of a row is parsed

_FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)")
_STUB = (ast.Pass, ast.Raise)


def answer_block(completion: str) -> str | None:
    """The last closed fence tagged python, py or python3 (in any case); None when there is none.

    Only where no fence is tagged so, the last one without a tag: after a program those hold what it prints.
    """
    blocks = _blocks(completion)
    tagged = [content for tag, content in blocks if tag]
    found = tagged or [content for _, content in blocks]
    return found[-1] if found else None


def _blocks(text: str) -> list[tuple[str, str]]:
    """Tag and content of every closed Python or untagged fence, in order; an indented fence's indentation is removed."""
    found: list[tuple[str, str]] = []
    opening: tuple[int, str, str] | None = None  # indentation, fence, tag
    content: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        match = _FENCE.fullmatch(line)
        if opening is None:
            if match:
                opening = (_width(match[1]), match[2], (match[3].split() or [""])[0].lower())
                content = []
            continue
        indent, fence, tag = opening
        is_end = match is not None and not match[3] and match[2][0] == fence[0] and len(match[2]) >= len(fence)
        if match is not None and is_end and _width(match[1]) <= indent + 3:
            if not tag or tag in PYTHON_TAGS:
                found.append((tag, "".join(content)))
            opening = None
        else:
            content.append(_without_indent(line, indent) + "\n")
    return found


def _width(blanks: str) -> int:
    return len(blanks.expandtabs(4))


def _without_indent(line: str, indent: int) -> str:
    blanks = len(line) - len(line.lstrip(" "))
    return line[min(blanks, indent) :]


# ---------------------------------------------------------------------------------------------------- the prompt


def prompt_code(prompt: str) -> str:
    """The Python source a prompt gives: all of it when it parses, else its last fenced block that does; else empty.

    A source that defines and imports nothing is an example of use or plain words, and is not meant.
    """
    for source in (prompt, *(content for _, content in reversed(_blocks(prompt)))):
        if _tree(source) is not None:
            return source
    return ""


def helpers_of(code: str) -> str:
    """The imports, functions, classes and constants of a prompt's code, without those it leaves to be written."""
    tree = _tree(code)
    if tree is None:
        return ""
    kept = [node for node in tree.body if isinstance(node, _GIVEN) and not is_stub(node)]
    return "\n".join(ast.unparse(node) for node in kept)


_DEFINES = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_GIVEN = (*_DEFINES, ast.Assign, ast.AnnAssign)


def _tree(source: str) -> ast.Module | None:
    """The parsed source, which may end in a bare signature; None when it does not parse or defines nothing."""
    for text in (source, f"{source.rstrip()}\n    pass"):
        tree = parse(text)
        if tree is not None and any(isinstance(node, _DEFINES) for node in tree.body):
            return tree
    return None


# CPython 3.11 counts the depth of the trees that it builds once for all threads: two that parse at a time, with a garbage
# collection between, raise SystemError ("AST constructor recursion depth mismatch"), 22 times in 360 here. The lock keeps
# ours apart; the tries are for a reward function of the user's that parses too.
_PARSING = threading.Lock()
_TRIES = 20


def parse(source: str) -> ast.Module | None:
    """Source of a row (never of an answer) as a tree; None when it is not Python."""
    for rest in reversed(range(_TRIES)):
        try:
            with _PARSING:
                return ast.parse(source, ROW)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            break
        except SystemError:
            if not rest:
                raise
    return None


def is_stub(node: ast.stmt) -> bool:
    """A function of nothing but a docstring, `pass`, `...` or `raise`, or a class with such a method."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return all(isinstance(part, _STUB) or _is_constant(part) for part in node.body)
    return isinstance(node, ast.ClassDef) and any(is_stub(part) for part in node.body)


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# ---------------------------------------------------------------------------------------------------- the program


def complete(answer: str, code: str, entry_point: str) -> str:
    """The program: the answer where it defines `entry_point`, else the prompt's code continued by it.

    Args:
        answer: a whole program, or the body of the last function of `code`, indented, not indented, or all but its
            first line.
        code: the prompt's code; empty when it gives none.
    """
    if not code or not entry_point:
        return answer
    lines = answer.split("\n")
    code_lines = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if code_lines and _indent(code_lines[0]):  # no program begins so
        body = answer
    elif defines(answer, entry_point):
        return answer
    elif _lost_an_indent(code_lines):
        first = lines.index(code_lines[0])
        lines[first] = min([INDENT, *filter(None, map(_indent, code_lines))], key=len) + lines[first]
        body = "\n".join(lines)
    else:
        body = textwrap.indent(answer, INDENT)
    return f"{code.rstrip()}\n{body}"


INDENT = "    "
_BESIDE = re.compile(
    r"(?:async[ \t]+def|def|class|import|from|if[ \t]+__name__)\b|@"
)  # follows a function at the margin


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip(" \t"))]


def _lost_an_indent(lines: list[str]) -> bool:
    """Lines of a body of which the first alone was stripped: below it nothing but other definitions is at the margin.

    Where the first opens a block, what is indented below may be just that block. A lost indentation shows in a line
    that is less indented than the block.
    """
    below = [_width(_indent(line)) for line in lines[1:] if not _BESIDE.match(line)]
    if not below:
        return len(lines) > 1
    is_block = lines[0].split("#")[0].rstrip().endswith(":")
    return min(below) > 0 and (not is_block or min(below) < below[0])


def defines(source: str, name: str) -> bool:
    """Lines of the source define a function (a method too), or, at the top level, anything else of that name."""
    function = rf"^[ \t]*(?:async[ \t]+)?def[ \t]+{re.escape(name)}[ \t]*[(\[]"
    return re.search(function, source, re.MULTILINE) is not None or name in defined(source)


def defined(source: str) -> set[str]:
    """The functions, classes, variables and imports that lines of the source define at the top level."""
    return {name for statement in _statements(source) for name in _bound_by(statement)}


_PARENTHESES = re.compile(r"\bimport[ \t]*\(([^()]*)\)")
_COMMENT = re.compile(r"#[^\n]*")
_NO_CODE = re.compile(r"""'[^'\n]*'|"[^"\n]*"|#.*""")
_NAMED = re.compile(r"(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)")
_BLOCK = re.compile(r"(?:async|elif|else|except|finally|for|if|try|while|with)\b")


def _statements(source: str) -> Iterator[str]:
    """Statements that begin at the left margin, those of one line apart, an import's lines together."""

    def on_one_line(names: re.Match[str]) -> str:
        return "import " + _COMMENT.sub("", names[1]).replace("\n", " ")

    for line in _PARENTHESES.sub(on_one_line, source.replace("\\\n", " ")).split("\n"):
        if not line[:1].isidentifier() and line[:1] != "(":  # most lines: indented, empty
            continue
        if _NAMED.match(line):
            yield line
        elif not _BLOCK.match(line):
            yield from (part.strip() for part in _NO_CODE.sub("", line).split(";"))


_IMPORT = re.compile(r"(?:from[ \t]+[\w.]+[ \t]+)?import[ \t]+(.+)")
_ANNOTATED = re.compile(r"(\w+)[ \t]*:[^=]*=(?!=)")
_ASSIGNED = re.compile(r"(?:[ \t]*\([\w \t,*]+\)[ \t]*=(?!=)|[\w \t,*]+=(?!=))+")


def _bound_by(statement: str) -> Iterator[str]:
    """The names that one statement binds: `def f`, `class f`, `import a as f`, `from a import f`, `f = g = ...`."""
    if match := _NAMED.match(statement):
        yield match[1]
    elif match := _IMPORT.match(statement):
        for part in match[1].split(","):
            yield from [words[-1].split(".")[0]] if (words := part.split()) else []
    elif match := _ANNOTATED.match(statement):
        yield match[1]
    elif match := _ASSIGNED.match(statement):
        yield from re.findall(r"[^\W\d]\w*", match[0])
