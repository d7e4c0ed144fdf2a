"""A configuration as text: YAML files and `section.key=value` overrides read, every key described."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from marsjax.training.config import ConfigError, TrainConfig, as_yaml
from marsjax.training.yaml_text import read_yaml


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> TrainConfig:
    """A configuration from a YAML file and overrides such as `optimizer.learning_rate=1e-5`, the last winning.

    Raises ConfigError naming the file or override, the key, and the nearest valid name.
    """
    tree: dict[str, Any] = {}
    where = "overrides"
    if path is not None:
        file = Path(path).expanduser()
        where = str(file)
        if not file.is_file():
            raise ConfigError(f"no such configuration file: {file} (looked in {Path.cwd()})")
        try:
            read = read_yaml(file.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} is not valid YAML: {error}") from error
        tree = {} if read is None else read
    config = _build(TrainConfig, tree, "", where, check=False)
    for override in overrides:
        config = _override(config, override)
    return _build(TrainConfig, config, "", where)


def _override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    try:
        value = read_yaml(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {error}") from error
    for name in reversed(key.strip().split(".")):
        value = {name: value}
    checked = _build(TrainConfig, value, "", f"override {override!r}", check=False)
    return _merge(tree, checked)


def _merge(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        # A mixture is one value: an override that added to it would train on more than it names.
        both = isinstance(value, dict) and isinstance(under.get(key), dict) and key != "train"
        merged[key] = _merge(under[key], value) if both else value
    return merged


def _build(cls: Any, tree: Any, prefix: str, where: str, check: bool = True) -> Any:
    """The dataclass that `tree` describes; with check=False the tree itself, its names and types verified."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where}: {prefix.rstrip('.') or 'the configuration'} must be a mapping, got {tree!r}")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {prefix}{key}{_suggest(str(key), prefix, hints)}")
        if dataclasses.is_dataclass(hints[key]):
            values[key] = _build(hints[key], {} if value is None else value, f"{prefix}{key}.", where, check)
        else:
            values[key] = _typed(hints[key], value, f"{where}: {prefix}{key}")
    if not check:
        return values
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _suggest(key: str, prefix: str, hints: dict[str, Any]) -> str:
    if near := difflib.get_close_matches(key, hints, n=1):
        return f"; did you mean {prefix}{near[0]}?"
    if not prefix:  # a field named without its section
        homes = [f"{s}.{key}" for s, t in hints.items() if key in typing.get_type_hints(t)]
        if homes:
            return f"; did you mean {' or '.join(homes)}?"
    return f"; known here: {', '.join(prefix + name for name in hints)}"


def _typed(hint: Any, value: Any, where: str) -> Any:
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        if typing.get_origin(option) is Literal:
            if value in typing.get_args(option) and isinstance(value, str):
                return value
        elif option is float:
            # YAML 1.1 reads 5e-6, without a dot, as a string.
            if isinstance(value, int | float | str) and not isinstance(value, bool):
                try:
                    return float(value)
                except (ValueError, OverflowError):
                    continue
        elif option is int:
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        elif option is not type(None) and isinstance(value, option):
            return value
    raise ConfigError(f"{where} must be {_type_name(hint)}, got {value!r}{_near_literal(options, value)}")


def _near_literal(options: tuple[Any, ...], value: Any) -> str:
    names = [n for o in options if typing.get_origin(o) is Literal for n in typing.get_args(o)]
    near = difflib.get_close_matches(str(value), names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_type_name(o) for o in typing.get_args(hint))
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a mapping",
             list: "a list"}  # fmt: skip
    return "null" if hint is type(None) else names.get(hint, str(hint))


def describe() -> str:
    """Every key with its default and meaning, for `--help`."""
    lines = []
    for section, cls in typing.get_type_hints(TrainConfig).items():
        lines.append(f"{section}:")
        for f in dataclasses.fields(cls):
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            name = f"{section}.{f.name}={as_yaml(default)}"
            lines.append(f"  {name:<46} {f.metadata['help']}")
            if typing.get_origin(f.type) is Literal:
                lines[-1] += f" ({' | '.join(typing.get_args(f.type))})"
    return "\n".join(lines)
