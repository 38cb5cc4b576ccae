"""Load targets: the names by which users refer to a model and a batch.

    train.py:make        a function in a file; train.py alone stands for its sacplan_target
    package.module:make  a function in a module; the current directory is searched first
    hf:gpt2, hf:config.json, hf:directory    from a configuration of transformers, without weights
    diffusers:black-forest-labs/FLUX.1-dev@1024x1024    the denoiser of an image or video model, without weights

The function takes no arguments and returns ``(model, batch)``, or a mapping with the keys ``model``, ``batch`` and
optionally ``loss_fn``, ``optimizer`` and ``make_batch`` (batch size to batch), as ``sacplan.profile`` takes them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

from sacplan.cli.files import kind_of
from sacplan.cli.options import named
from sacplan.cli.output import note
from sacplan.errors import SacplanError
from sacplan.integrations.hf import architectures
from sacplan.integrations.hf.target import NAMED, ModelOptions, Target, TargetError, given, hinted

_DEFAULT_NAME = "sacplan_target"
_FAKE_TENSORS = (
    "torch._subclasses.fake_tensor"  # logs each error that it raises; ``--debug`` shows the traceback
)
_KEYS = {"model", "batch", "loss_fn", "optimizer", "make_batch"}
_FORMS = "FILE.py:FUNCTION, MODULE:FUNCTION, hf:NAME, hf:CONFIG.json or diffusers:NAME"


def is_json_file(text: str) -> bool:
    """Return whether the text names a saved file rather than a target."""
    return not text.startswith(NAMED) and text.lower().endswith((".json", ".json.gz"))


def load_target(text: str, options: ModelOptions, place: str = "meta") -> Target:
    """Load a target.

    Args:
        text: as the user wrote it.
        options: of ``hf:`` targets; other targets take at most ``batch``.
        place: the device to make an ``hf:`` model on; on ``"meta"`` it has no weights.

    Raises:
        TargetError: the target does not exist, or the user's code failed. The message names the line.
    """
    if text.startswith("diffusers:"):
        from sacplan.integrations import diffusers  # imports torch

        with users_code(text):
            return diffusers.build(text, options, place)
    if text.startswith("hf:"):
        from sacplan.integrations.hf.models import build

        with users_code(text):
            return build(text, options, place, functools.partial(_may_fetch, fetch=options.fetch))
    # Any target may make batches of a size. Everything else is up to the user's function.
    if asked := given(options, "batch"):
        raise TargetError(f"{named(asked)}: only for hf: targets; {text!r} decides that itself.")
    # A file first: ``train.py:make`` would match as a module, too.
    if match := re.fullmatch(r"(.+\.py)(?::(.+))?", text):
        module, attribute = _load_file(Path(match[1])), match[2]
    elif match := re.fullmatch(r"([\w.]+):([\w.]+)", text):
        module, attribute = _load_module(match[1]), match[2]
    else:
        if is_json_file(text):
            raise not_a_model(text)
        raise TargetError(f"{text!r} is not a target; write {_FORMS}.{_meant(text)}")
    function = _find(module, attribute, text)
    with users_code(text):
        try:
            made = function()
        except TypeError as error:
            # Raised by the call itself, not in the function: it takes arguments.
            if error.__traceback__ is None or error.__traceback__.tb_next is None:
                raise TargetError(f"{text} is called without arguments: {error}.") from error
            raise
        target = _target(text, made)
        if options.batch is None:
            return target
        if target.make_batch is None:
            raise TargetError(
                f"--batch {options.batch}: {text} makes batches of one size. Return a mapping with the key make_batch "
                "as well, a function of the batch size."
            )
        return replace(target, batch=target.make_batch(options.batch))


def _may_fetch(name: str, *, fetch: bool | None) -> bool:
    """Return whether the configuration may be fetched: yes with ``--fetch``, else as the user answers on a terminal."""
    from huggingface_hub import constants

    from sacplan.integrations.hf.hub import FILE

    what = f"{FILE} of {name}, and no other file, from {constants.ENDPOINT}"
    # Nobody answers in a pipe, in a job or in CI: nothing is fetched there without the option.
    if fetch is None and sys.stdin.isatty() and sys.stderr.isatty():
        fetch = typer.confirm(f"Fetch {what}?", err=True)
    if fetch:
        note(f"fetching {what}")
    return bool(fetch)


def _meant(text: str) -> str:
    if Path(f"{text}.py").is_file():
        return f" Did you mean {text}.py?"
    names = [text] if (Path(text) / "config.json").is_file() or architectures.find(text) else []
    names = names or architectures.near(text)
    return f" Did you mean hf:{' or hf:'.join(names)}?" if names else ""


def not_a_model(text: str, profile: str = "") -> TargetError:
    """Return the error for a JSON file in place of a model.

    ``profile`` is ``"a profile or "`` where a saved profile would do as well.
    """
    path = Path(text)
    kind = kind_of(path) if path.is_file() else None
    if kind == "configuration":
        return TargetError(f"{text} looks like a configuration of transformers. Did you mean hf:{text}?")
    # Each kind of file has its own place on the command line.
    place = {
        "plan": f" It comes second: sacplan verify TARGET {text}.",
        "device": f" Give it as --device {text}.",
    }
    what = "JSON file" if kind is None else kind
    return TargetError(
        f"{text} is a {what}; {profile}the model itself is needed here: {_FORMS}.{place.get(what, '')}"
    )


@contextlib.contextmanager
def users_code(name: str) -> Iterator[None]:
    """Run code of the user: its output goes to stderr, and its errors become a ``TargetError`` that names a line.

    An error passes through if no frame of its traceback is outside of sacplan and torch or in the forward of a module:
    the error is then a bug of sacplan.
    """
    from sacplan.torch_compat.private import without_a_log  # imports torch

    with contextlib.redirect_stdout(sys.stderr), without_a_log(_FAKE_TENSORS):
        try:
            yield
        except SacplanError:
            raise
        except SystemExit as error:
            raise TargetError(
                f"{name} ended the process (exit code {error.code}) while it was loaded. Put what a script does "
                'when it is run under `if __name__ == "__main__":`.'
            ) from error
        except Exception as error:
            # No frame of the user's: this is a bug of sacplan, and must not be blamed on the user.
            where = _where(error)
            if where is None:
                raise
            failed = TargetError(f"{name} raised {type(error).__name__}: {error} ({where}).")
            raise hinted(failed, "--debug shows the whole traceback") from error


def _where(error: Exception) -> str | None:
    """Return file and line of the innermost frame outside of torch and sacplan.

    Without one, return the class of the innermost module whose forward was running; None if there is neither.
    """
    # Raised by the import machinery: the traceback has no frame of the file itself.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).parent.parent)
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    skipped = [ours, contextlib.__file__, "<frozen", str(importlib.__file__)]
    skipped += [] if torch is None else [str(Path(torch).parent)]
    place = module = None
    # From the outermost frame inwards: the last match is the innermost.
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        # A model of a library that is in torch has no frame of the user's; its class is the next best.
        if code.co_name == "forward" and "self" in frame.f_locals:
            module = f"in {type(frame.f_locals['self']).__name__}"
        if not code.co_filename.startswith(tuple(skipped)):
            place = f"{code.co_filename}:{line}, in {code.co_name}"
    return place or module


def _load_module(name: str) -> ModuleType:
    # As ``python -m`` does; the script that runs is in another directory.
    _search_first(Path.cwd())
    try:
        with users_code(name):
            return importlib.import_module(name)
    except (TargetError, ModuleNotFoundError) as error:
        # Only if the module itself or its package is missing, not something that it imports.
        missing = error.__cause__ or error
        if isinstance(missing, ModuleNotFoundError) and f"{name}.".startswith(f"{missing.name}."):
            raise TargetError(
                f"there is no module {name!r}, neither in the current directory nor installed. "
                "A file is written with its suffix: train.py:make."
            ) from missing
        raise


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"{path}: there is no such file.")
    _search_first(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look modules up here
    with users_code(str(path)):
        spec.loader.exec_module(module)
    return module


def _search_first(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _find(module: ModuleType, attribute: str | None, text: str) -> Callable[[], Any]:
    wanted = attribute or _DEFAULT_NAME
    found: Any = module
    for part in wanted.split("."):
        found = getattr(found, part, None)
    file = text.removesuffix(f":{attribute}")
    # A target can only have a model if it has imported torch; do not import it for this.
    torch, is_class = sys.modules.get("torch"), inspect.isclass(found)
    # A model and its class are callable, too, but no targets.
    is_model = torch is not None and issubclass(found if is_class else type(found), torch.nn.Module)
    if callable(found) and not is_model:
        function: Callable[[], Any] = found
        return function
    if found is not None:
        what = f"the class {found.__name__}" if is_class else f"of type {type(found).__name__}"
        raise TargetError(
            f"{text} is {what}, and a target is a function without arguments that returns a model and a batch: "
            f"def {_DEFAULT_NAME}(): return model, batch"
        )
    # Functions that the module defines itself, and not those that it has imported.
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    has = f"it has {', '.join(names)}" if names else "it defines no functions"
    example = f"; name one as {file}:{names[0]}" if names and attribute is None else ""
    raise TargetError(f"{file} has no function {wanted}; {has}{example}.")


def _target(text: str, made: Any) -> Target:
    # Checked here, where the message can name the target.
    if isinstance(made, tuple) and len(made) == 2:
        return Target(text, *made)
    if isinstance(made, Mapping) and {"model", "batch"} <= made.keys() <= _KEYS:
        return Target(text, **made)
    what = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
    what = f"a mapping with the keys {', '.join(map(str, made))}" if isinstance(made, Mapping) else what
    raise TargetError(
        f"{text} returned {what}; return (model, batch), or a mapping with the keys model and batch, and optionally "
        "loss_fn, optimizer and make_batch."
    )
