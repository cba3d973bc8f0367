"""How the `code` reward grades: `extract` finds the program, `tests` reads a row's tests, `run` runs and `compare`s."""
