"""Load and validate a region file, and report each error with its line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

from geofed_pb.errors import GeofedError
from geofed_pb.files import strict_yaml
from region_agent.config._data import DatasetConfig
from region_agent.config._model import RegionConfig
from region_agent.config._section import Section

_Resolved = TypeVar("_Resolved", bound=Section)


def load_config(path: Path) -> RegionConfig:
    """Read a region file; relative paths in it are relative to its folder.

    Raises ``GeofedError("CONFIG_INVALID")`` with every invalid key and its line.
    """
    try:
        document = strict_yaml.parse(path.read_text(encoding="utf-8"), str(path))
        config = strict_yaml.validate(RegionConfig, document)
    except FileNotFoundError:
        raise GeofedError("CONFIG_INVALID", f"there is no {path}", hint="give the file with --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise GeofedError("CONFIG_INVALID", f"{path}: {error}") from None
    except strict_yaml.InvalidYaml as error:
        raise GeofedError("CONFIG_INVALID", str(error)) from None
    _check_stores(config, document)
    _check_samples(config, document)
    resolved = _resolved(config, path.parent.resolve())
    _check_accounts(resolved, document)
    return resolved


def _check_stores(config: RegionConfig, document: strict_yaml.Document) -> None:
    for name, held in config.datasets.items():
        if held.store and held.store not in config.stores:
            text = f"`datasets.{name}.store`: {held.store!r} is not in stores"
            raise GeofedError("CONFIG_INVALID", document.error(("datasets", name, "store"), text))
    for number, models in enumerate(config.models):
        if models.store and models.store not in config.stores:
            text = f"`models.{number}.store`: {models.store!r} is not in stores"
            raise GeofedError("CONFIG_INVALID", document.error(("models", number, "store"), text))


def _check_samples(config: RegionConfig, document: strict_yaml.Document) -> None:
    for name, held in config.datasets.items():
        for split, part in held.splits.items():
            if part.samples is None and held.format is None:
                text = f"`datasets.{name}.splits.{split}.samples` is required without a `format`"
                raise GeofedError("CONFIG_INVALID", document.error(("datasets", name, "splits", split), text))


def _check_accounts(config: RegionConfig, document: strict_yaml.Document) -> None:
    """Refuse data with a budget of privacy that have another name, too: what jobs spend by that is not in the budget.

    Raises ``GeofedError("CONFIG_INVALID")``.
    """
    for name, held in config.datasets.items():
        if held.privacy is None:
            continue
        own = _places(held)
        for other, there in config.datasets.items():
            if other != name and (both := own & _places(there)):
                text = f"`datasets.{name}.privacy` is no bound of {min(both)[1]}, which is also in datasets.{other}"
                raise GeofedError("CONFIG_INVALID", document.error(("datasets", name, "privacy"), text))


def _places(held: DatasetConfig) -> set[tuple[str, str]]:
    """Return store and address of each split."""
    uris = [part.uri for part in held.splits.values()]
    return {(held.store, uri if uri.startswith("s3://") else os.path.realpath(uri)) for uri in uris}


def _resolved(config: RegionConfig, folder: Path) -> RegionConfig:
    datasets = {}
    for name, held in config.datasets.items():
        splits = {
            split: part.model_copy(update={"uri": _absolute(part.uri, folder)}) for split, part in held.splits.items()
        }
        datasets[name] = held.model_copy(update={"splits": splits})
    channel = _files_resolved(config.channel, ("path", "password_file"), folder)
    gateway = _files_resolved(config.gateway, ("user_file", "password_file", "ca_file"), folder)
    files = ("ca_file", "certificate_file", "key_file")
    identity = _files_resolved(config.identity, files, folder) if config.identity is not None else None
    secrets = {name: _files_resolved(secret, ("file",), folder) for name, secret in config.secrets.items()}
    packages = _files_resolved(config.task_packages, ("wheels",), folder) if config.task_packages is not None else None
    changed = {
        "task_packages": packages,
        "datasets": datasets, "channel": channel, "gateway": gateway, "identity": identity, "secrets": secrets,
    }  # fmt: skip
    return config.model_copy(update=changed)


def _files_resolved(section: _Resolved, names: tuple[str, ...], folder: Path) -> _Resolved:
    given = {name: value for name in names if (value := getattr(section, name, None)) is not None}
    return section.model_copy(update={name: folder / value for name, value in given.items()})


def _absolute(uri: str, folder: Path) -> str:
    if uri.startswith("s3://"):
        return uri
    plain = uri.removeprefix("file://")
    path = str(folder / plain)
    return path + "/" if plain.endswith("/") and not path.endswith("/") else path
