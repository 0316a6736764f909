"""Loads the pipeline from the Python file of a user."""

import importlib.util
import inspect
import re
import sys
import traceback
from pathlib import Path

from penstock.core.errors import Misconfigured, PenstockError
from penstock.core.text import did_you_mean
from penstock.pipeline.description import Description
from penstock.pipeline.pipeline import Pipeline


def load(path: Path) -> Description:
    """Run the file and return its pipeline; its errors become Misconfigured with the line."""
    if not path.is_file():
        raise Misconfigured(str(path), "there is no such file", "name a Python file that creates a Pipeline")
    spec = importlib.util.spec_from_file_location(f"penstock_pipeline_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise Misconfigured(str(path), "this is not a Python file", "its name has to end in .py")
    module = importlib.util.module_from_spec(spec)
    # A pipeline may import modules from its folder.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except PenstockError as error:
        if isinstance(error, Misconfigured) and error.location.startswith(f"{path.name}:"):
            raise
        raise Misconfigured(_location(error, path), str(error)) from error
    except TypeError as error:
        raise _unknown_option(error, path) or Misconfigured(_location(error, path), f"TypeError: {error}") from error
    except Exception as error:
        text = error.msg if isinstance(error, SyntaxError) else error
        raise Misconfigured(_location(error, path), f"{type(error).__name__}: {text}") from error
    finally:
        # Remove it: functions of a module that cannot be imported are pickled by value for the workers of Spark.
        del sys.modules[spec.name]
    # One pipeline may be bound to several names.
    found = list({id(value): value for value in vars(module).values() if isinstance(value, Pipeline)}.values())
    if len(found) != 1:
        problem = "it creates no Pipeline" if not found else f"it creates {len(found)} pipelines"
        raise Misconfigured(path.name, problem, 'create one: app = Pipeline("name")')
    try:
        return found[0].describe()
    except Misconfigured as error:
        if error.location.startswith(f"{path.name}:"):
            raise
        raise Misconfigured(f"{path.name}, {error.location}", error.problem, error.fix) from error


def _unknown_option(error: TypeError, path: Path) -> Misconfigured | None:
    """The error for an unknown option of a Pipeline method; None if it is another TypeError."""
    match = re.search(r"Pipeline\.(\w+)\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if match is None:
        return None
    method, option = match.groups()
    options = [name for name in inspect.signature(getattr(Pipeline, method)).parameters if name != "self"]
    fix = did_you_mean(option, options, f"its options are {', '.join(options)}")
    return Misconfigured(_location(error, path), f'app.{method}() has no option "{option}"', fix)


def _location(error: Exception, path: Path) -> str:
    """The file and line of an error: a line of the user's file, or the file with the syntax error."""
    if isinstance(error, SyntaxError):
        name = Path(error.filename or path).name
        return f"{name}:{error.lineno}" if error.lineno else name
    own = path.absolute()
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == own]
    return f"{path.name}:{lines[-1]}" if lines else path.name
