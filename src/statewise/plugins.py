"""Importing plug-ins: files, modules and entry points that a recipe names."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from statewise.errors import RecipeError


<<<<<<< HEAD
def find_file(name: str, base: Path | None) -> Path:
    """Where a file that a recipe names is: beside the recipe, in `base`, or else in the working directory."""
    beside = (base or Path()) / name
    return beside if beside.is_file() else Path(name)
=======
def find_file(name: str, base: Path | None) -> Path | None:
    """The file of that name beside the recipe, in the directory `base`, else in the working directory."""
    given = Path(name).expanduser()
    return next((path for path in ((base or Path()) / given, given) if path.is_file()), None)
>>>>>>> main


def load_file(name: str, base: Path | None) -> Any:
    """The module of a Python file, as `find_file` finds it. Raises RecipeError where it can't be loaded."""
    path = find_file(name, base)
<<<<<<< HEAD
    if not path.is_file():
        looked = dict.fromkeys(str(folder.resolve()) for folder in (base or Path(), Path()))
        raise RecipeError(f"no file '{name}'; looked in {' and '.join(looked)}.")
=======
    if path is None:
        looked = dict.fromkeys([str((base or Path()).resolve()), str(Path.cwd())])
        raise RecipeError(f"plugins: no file '{name}'; looked in {' and '.join(looked)}.")
>>>>>>> main
    spec = importlib.util.spec_from_file_location(f"statewise_plugin_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"plugins: '{path}' failed to load: {type(error).__name__}: {error}") from error
    return module


def load_module(name: str) -> Any:
    """The module of an entry point of group "statewise.plugins", or of an importable name. Raises RecipeError."""
    for entry in entry_points(group="statewise.plugins"):
        if entry.name == name:
            return sys.modules[entry.load().__module__] if not inspect.ismodule(entry.load()) else entry.load()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RecipeError(
            f"plugins: '{name}' is neither a file ending in .py, nor an entry point of group 'statewise.plugins', "
            f"nor a module that imports ({error})."
        ) from error
