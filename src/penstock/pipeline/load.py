"""From a user's file to the pipeline in it."""

import importlib.util
import sys
import traceback
from pathlib import Path

from penstock.errors import Misconfigured, PenstockError
from penstock.pipeline.description import Description, Pipeline


def load(path: Path) -> Description:
    """Run the file and take its pipeline; what goes wrong in it is told with its line."""
    if not path.is_file():
        raise Misconfigured(str(path), "there is no such file", "give the path of a Python file that makes a Pipeline")
    spec = importlib.util.spec_from_file_location(f"penstock_pipeline_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise Misconfigured(str(path), "this is not a Python file", "its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    # A pipeline may import what lies beside it, and executors must find its functions by name.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except PenstockError as error:
        raise Misconfigured(f"{path.name}:{_line(error, path)}", str(error)) from error
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
        raise Misconfigured(f"{path.name}:{_line(error, path)}", problem) from error
    found = [value for value in vars(module).values() if isinstance(value, Pipeline)]
    if len(found) != 1:
        problem = "it makes no Pipeline" if not found else f"it makes {len(found)} pipelines"
        raise Misconfigured(path.name, problem, 'write one: app = Pipeline("name")')
    try:
        return found[0].describe()
    except Misconfigured as error:
        raise Misconfigured(f"{path.name}, {error.place}", error.problem, error.way_out) from error


def _line(error: BaseException, path: Path) -> int | str:
    """The line of the user's own file at which it happened."""
    if isinstance(error, SyntaxError) and error.lineno:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return lines[-1] if lines and lines[-1] is not None else "?"
