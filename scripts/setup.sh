# Sourced by the other scripts: a virtual environment in .venv with the package and its extras, made once.
# PYTHON chooses the interpreter (3.11 to 3.13); EXTRAS the extras; PIP_REQUIRE_FIRST a requirement to install before them.
VENV="${VENV:-.venv}"
EXTRAS="${EXTRAS:-rl}"
PYTHON="${PYTHON:-python3}"
"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || {
  echo "palingenesis needs Python 3.11 to 3.13; $("$PYTHON" --version 2>&1) was found. Set PYTHON=python3.12, for example." >&2
  exit 2
}
STAMP="$VENV/.installed-$EXTRAS"
if [ ! -e "$STAMP" ] || [ pyproject.toml -nt "$STAMP" ]; then
  echo "setting up $VENV (once, a few minutes) ..." >&2
  [ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
  if [ -n "${PIP_REQUIRE_FIRST:-}" ]; then "$VENV/bin/pip" install --quiet "$PIP_REQUIRE_FIRST"; fi
  "$VENV/bin/pip" install --quiet --editable ".[$EXTRAS]"
  touch "$STAMP"
fi
