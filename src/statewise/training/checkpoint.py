"""Checkpoints: written under a temporary name, checksummed, renamed when whole; safetensors and JSON, no pickle.

checkpoints/step_000020/
    model.safetensors, config.json, tokenizer.json ...   or adapter_model.safetensors: what from_pretrained reads
    optimizer.safetensors                                the optimizer's state by parameter name
    components.safetensors                               what components keep between steps (`World.state`)
    trainer.json                                         what was spent
    manifest.json                                        size and SHA-256 of every other file, written last
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from statewise.errors import CheckpointError
from statewise.files import naming, open_to_others, sha256, sync, to_json
from statewise.run import steps_in

if TYPE_CHECKING:
    import torch

MANIFEST, TRAINER = "manifest.json", "trainer.json"
LEFTOVER = ".tmp_"  # directories that are being written or deleted


def save(run: Path, step: int, *, write: Callable[[Path], None], state: dict[str, Any]) -> Path:
    """The checkpoint of `step`: what `write` puts into the directory it is given, and `state` for `load_state`.

    It appears under its name when all of it is on the disk. A valid checkpoint of the step is left as it is, since
    weights are a function of the step.
    """
    parent = run / "checkpoints"
    target, temporary = parent / f"step_{step:06d}", parent / f"{LEFTOVER}step_{step:06d}"
    if target.is_dir():
        if not verify(target):
            return target
        _remove(target)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with naming(target):
            write(temporary)
            _seal(temporary, step, state)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise
    if (run / "metrics.jsonl").is_file():
        sync(run / "metrics.jsonl")
    os.replace(temporary, target)
    sync(parent)
    return target


def _seal(directory: Path, step: int, state: dict[str, Any]) -> None:
    """Add the state and the manifest, and put all on the disk."""
    (directory / TRAINER).write_text(to_json(state, indent=2) + "\n", encoding="utf-8")
    entries = {str(f.relative_to(directory)): _entry(f) for f in sorted(directory.rglob("*")) if f.is_file()}
    (directory / MANIFEST).write_text(to_json({"step": step, "files": entries}, indent=2) + "\n", encoding="utf-8")
    open_to_others(directory)
    for path in (*directory.rglob("*"), directory):
        sync(path)


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file)}


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint directory, a line a fault; empty where every file is as it was written."""
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        checks = [(name, int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()]
    except FileNotFoundError:
        return [f"{MANIFEST} is missing, so the checkpoint was not written to its end"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{MANIFEST} can't be read: {error!r}"]
    problems = [_fault(path / name, size, digest) for name, size, digest in checks]
    return [f"{name} {problem}" for (name, *_), problem in zip(checks, problems, strict=True) if problem]


def _fault(file: Path, size: int, digest: str) -> str | None:
    try:
        found = file.stat().st_size
        if found != size:
            return f"has {found} bytes, expected {size}"
        return None if sha256(file) == digest else "has other bytes than were written (SHA-256 differs)"
    except OSError as error:
        return f"can't be read: {error.strerror}"


def latest_valid(run: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint that is whole, None where there is none; says which newer ones are not, and why."""
    for step, path in reversed(steps_in(run / "checkpoints").items()):
        problems = verify(path)
        if not problems:
            return path
        say(f"checkpoint of step {step} can't be used: {problems[0]}; going back to the one before")
    return None


def clear(run: Path, say: Callable[[str], None] = print) -> None:
    """Remove what an interrupted write or deletion left; only for who holds the run's lock, since it may be under way."""
    for leftover in sorted((run / "checkpoints").glob(f"{LEFTOVER}*")):
        say(f"removing {leftover.name}: its writing or deletion was interrupted")
        shutil.rmtree(leftover, ignore_errors=True)


def load_state(path: Path) -> dict[str, Any]:
    """The `state` that was given to `save`. Raises CheckpointError."""
    try:
        return dict(json.loads((path / TRAINER).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path / TRAINER}: can't be read: {error}") from None


def prune(run: Path, keep_last: int, keep_every: int | None, keep: Collection[int] = ()) -> None:
    """Delete checkpoints but the last `keep_last`, those whose step `keep_every` divides, and the steps in `keep`."""
    found = steps_in(run / "checkpoints")
    kept = {*list(found)[-keep_last:], *keep}
    for step, path in found.items():
        if step not in kept and not (keep_every and step % keep_every == 0):
            _remove(path)


def _remove(path: Path) -> None:
    doomed = path.with_name(f"{LEFTOVER}deleted_{path.name}")  # first the name, so that no half-deleted one is found
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)


def save_tensors(path: Path, nested: Any) -> None:
    """Nested dicts, lists and tuples of tensors, numbers, text, booleans and None, as one safetensors file.

    The structure is JSON in the file's metadata. Raises CheckpointError that names the place of anything else.
    """
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    structure = _pack(nested, "", tensors)
    save_file(tensors, path, metadata={"structure": json.dumps(structure)})


def load_tensors(path: Path) -> Any:
    """What `save_tensors` wrote, on the CPU, with the same types and bytes. Raises CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            structure = json.loads(file.metadata()["structure"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        return _unpack(structure, tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: is not a file of save_tensors: {error}") from None


def _pack(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        name = where if where not in tensors else f"{where}#{len(tensors)}"
        # safetensors refuses tensors that share memory, and tied or sliced ones do.
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return ["tensor", name]
    if isinstance(value, dict):
        return ["dict", [[k, _pack(v, f"{where}/{k}", tensors)] for k, v in value.items() if _is_key(k, where)]]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_pack(v, f"{where}/{i}", tensors) for i, v in enumerate(value)]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    raise CheckpointError(f"can't save {type(value).__name__} at '{where}': expected tensors, numbers, text or None.")


def _is_key(key: Any, where: str) -> bool:
    if isinstance(key, str | int) and not isinstance(key, bool):
        return True
    raise CheckpointError(f"can't save the key {key!r} at '{where}': expected text or an integer.")


def _unpack(structure: list[Any], tensors: dict[str, torch.Tensor]) -> Any:
    kind, content = structure
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(value, tensors) for key, value in content}
    if kind in ("list", "tuple"):
        items = [_unpack(value, tensors) for value in content]
        return items if kind == "list" else tuple(items)
    return content


def save_model(path: Path, model: Any, tokenizer: Any, state_dict: dict[str, torch.Tensor]) -> None:
    """Model, or PEFT adapter, and tokenizer, as from_pretrained reads them; weights and dtypes are `state_dict`'s."""
    if hasattr(model, "peft_config"):
        for config in model.peft_config.values():
            config.base_model_name_or_path = _base_name(config.base_model_name_or_path)
        # "auto" would look the base up on the hub; nothing here resizes embeddings, and trained ones are in the state.
        model.save_pretrained(path, state_dict=state_dict, save_embedding_layers=False)
        (path / "README.md").unlink(missing_ok=True)  # PEFT's form, in which nothing is filled in
    else:
        model.generation_config.use_cache = True  # training without a cache must not make the saved model generate so
        model.save_pretrained(path, state_dict=_without_tied(model, state_dict))
    tokenizer.save_pretrained(path)


def _without_tied(model: Any, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state with each tied parameter under its first name only, as from_pretrained expects it."""
    first = {id(p): name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    again = {n for n, p in model.named_parameters(remove_duplicate=False) if first[id(p)] != n}
    return {name: value for name, value in state_dict.items() if name not in again}


def _base_name(name: str | None) -> str | None:
    """The embedded base by its name, since its directory is another one on every machine."""
    from statewise.tiny import model_path

    return "tiny" if name == str(model_path()) else name
