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

PYTHON_TAGS = frozenset({"", "python", "py", "python3"})
ROW = "<row>"  # the file name under which code of a row is parsed

_FENCE = re.compile(r"([ \t]*)(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)")
_STUB = (ast.Pass, ast.Raise)


def answer_block(completion: str) -> str | None:
    """The last closed fence tagged python, py, python3 (in any case) or not at all; None when there is none."""
    found = fenced_blocks(completion)
    return found[-1] if found else None


def fenced_blocks(text: str) -> list[str]:
    """The contents of every closed Python or untagged fence, in order; an indented fence's indentation is removed."""
    found: list[str] = []
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
            if tag in PYTHON_TAGS:
                found.append("".join(content))
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
    for source in (prompt, *reversed(fenced_blocks(prompt))):
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
        answer: a whole program, or the body of the last function of `code`, indented or not.
        code: the prompt's code; empty when it gives none.
    """
    if not code or not entry_point or defines(answer, entry_point):
        return answer
    first = next((line for line in answer.split("\n") if line.strip()), "")
    body = answer if first[:1] in (" ", "\t") else textwrap.indent(answer, "    ")
    return f"{code.rstrip()}\n{body}"


def defines(source: str, name: str) -> bool:
    """A line of the source defines a function (a method too), a class or a top-level variable of that name."""
    name = re.escape(name)
    pattern = rf"^(?:[ \t]*(?:async[ \t]+)?def[ \t]+{name}[ \t]*[(\[]|class[ \t]+{name}\b|{name}[ \t]*[:=](?!=))"
    return re.search(pattern, source, re.MULTILINE) is not None


_DEFINED = re.compile(
    r"^(?:(?:async[ \t]+)?def[ \t]+|class[ \t]+)([^\W\d]\w*)|^([^\W\d]\w*)[ \t]*(?::[^=\n]*)?=(?!=)", re.MULTILINE
)


def defined(source: str) -> set[str]:
    """The functions, classes and variables that lines of the source define at the top level."""
    return {name for pair in _DEFINED.findall(source) for name in pair if name}
