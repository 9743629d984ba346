"""The one reader of settings: a view's file, environment, flags and files of secrets become a `Settings`.

Flags override variables, which override the file, which overrides the view's own defaults. Files of secrets
are read last, each in place of the setting that names it. Unknown keys are refused, and so are keys that are
no settings any more; unknown `BATON_…` variables are a warning.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from baton.base.errors import BatonError, ErrorKind
from services.common.config.secret_files import read_secret_file, read_shared_secret
from services.common.config.settings import Settings
from services.common.config.tree import Setting, settings_of, without_links
from services.common.config.variables import is_service_link, unknown_variables
from services.common.config.views import SECRET_FILES, View

# Secrets that a `secrets_file` holds together, by name.
SECRETS: Mapping[str, str] = {path.rpartition(".")[2]: path for path in SECRET_FILES}
# Sections whose values are not repeated in errors: they may hold a password.
_PRIVATE = ("state", "auth", "prefix_secret", "cluster_secret", "tracing")


def add_flags(parser: argparse.ArgumentParser, view: View, *, file: bool | None = True) -> None:
    """Adds the flags of a view's settings, and `--config`: required where `file` is True, optional where it
    is False, none at all where it is None."""
    if file is not None:
        add_config_flag(parser, "YAML file of settings, keys see below", required=file)
        parser.epilog = "Keys of FILE: " + ", ".join(one.path for one in view.settings if not one.fixed) + "."
    for one in view.settings:
        if one.flag:
            _add_flag(parser, one)


def add_config_flag(parser: argparse.ArgumentParser, text: str, *, required: bool = True) -> None:
    """Adds `--config`, the file of settings that a command reads."""
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", required=required, help=text)


def read(
    view: View,
    arguments: argparse.Namespace,
    environment: Mapping[str, str],
    given: Mapping[str, object] | None = None,
    warn: Callable[[str], None] = lambda line: None,
) -> Settings:
    """The settings of a command. `given`: values by path that go before all others, of which None is left
    out; `warn` is told of unknown variables, a line each.

    Raises `BatonError(INVALID)` with one line for the first error, which shows no secret.
    """
    values = read_yaml(arguments.config) if arguments.config else {}
    _refuse_keys(values, view)
    for line in unknown_variables(environment, [one.variable for one in settings_of() if one.variable]):
        warn(line)
    flags = {one.path: getattr(arguments, one.key, None) for one in view.settings if one.flag}
    for source in (_variables(view, environment), flags, given or {}):
        _override(values, {path: value for path, value in source.items() if value is not None})
    for path, value in view.defaults.items():
        _put(values, path, value, keep=True)
    return _settings(view, values)


def read_values(view: View, values: Mapping[str, Any]) -> Settings:
    """The settings of nested values alone, such as a part of a file. Raises `BatonError(INVALID)`."""
    _refuse_keys(values, view)
    return _settings(view, dict(values))


def _settings(view: View, values: dict[str, Any]) -> Settings:
    _require(values, view)
    return _with_secrets(values, validated(values), view)


def read_yaml(path: Path, *, secret: bool = False, what: str = "") -> dict[str, Any]:
    """The mapping of a YAML file; errors begin with `what`, and with `secret` do not quote the file. Raises
    `BatonError(INVALID)`."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(f"cannot read {what}{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = "" if secret else f": {' '.join(str(error).split())}"
        raise invalid(f"{what}{path} is not valid YAML{reason}") from None
    if values is not None and not isinstance(values, dict):
        raise invalid(f"{what}{path} must hold settings by name, not a {type(values).__name__}")
    return values or {}


def read_secrets(path: Path) -> dict[str, str]:
    """The secrets in a YAML file, by name. Raises `BatonError(INVALID)`, whose message shows no secret."""
    values = read_yaml(path, secret=True, what="secrets_file ")
    for name, secret in values.items():
        if name not in SECRETS:
            raise invalid(f"secrets_file {path}: unknown key {name}{nearest(name, SECRETS)}")
        if not isinstance(secret, str):
            raise invalid(f"secrets_file {path}: {name} must be text")
    return {name: secret for name, secret in values.items() if secret}


def validated(values: Mapping[str, Any]) -> Settings:
    """The settings of nested values. Raises `BatonError(INVALID)` with the first error."""
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise invalid(first_problem(error)) from None


def invalid(message: str) -> BatonError:
    """An operator's mistake: commands print the message and exit with code 2."""
    return BatonError(ErrorKind.INVALID, message)


def first_problem(error: ValidationError, *, values: bool = True) -> str:
    """The first of a validation's errors, in one line that names key and flag, and with `values` the value,
    unless it may be a secret."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}"
    flag = next((one.flag for one in settings_of() if one.path == key and one.flag), None)
    place = f"{key} ({flag})" if flag else key
    shown = "" if key.startswith(_PRIVATE) or not values else f" is {first['input']!r}"
    return f"{place}{shown}: {first['msg'][0].lower()}{first['msg'][1:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """ "(did you mean …?)", where a known name is near to one that is not."""
    last = {path.rpartition(".")[2]: path for path in known}
    found = difflib.get_close_matches(name.rpartition(".")[2], last, 1, 0.7)
    return f" (did you mean {last[found[0]]}?)" if found else ""


def _add_flag(parser: argparse.ArgumentParser, one: Setting) -> None:
    bare = "true" if bool in one.types else None
    sentence = without_links(one.sentence).replace("%", "%%")
    parser.add_argument(
        one.flag or "",
        dest=one.key,
        metavar="none" if one.is_section else "|".join(one.choices) or one.unit.upper().replace(" ", ""),
        help=f"{sentence} (default {one.default})" if one.default else sentence,
        nargs="?" if bare else None,
        const=bare,
    )
    if one.field.default is True:
        no = f"--no-{one.key.replace('_', '-')}"
        parser.add_argument(no, dest=one.key, action="store_const", const="false", help="the reverse of it")


def _refuse_keys(values: Mapping[str, Any], view: View) -> None:
    """Raises for the first key that the view does not read."""
    whole = {one.path: one for one in settings_of()}
    of_roles = values.get("engine_of_role")
    for engine in of_roles.values() if isinstance(of_roles, dict) else ():
        _refuse_keys({"engine": engine}, view)
    for path in _paths(values, whole):
        one = whole.get(path)
        within = [known for known in whole if known == path or known.startswith(f"{path}.")]
        if not within:
            public = [known.path for known in view.settings if not known.fixed]
            raise invalid(f"unknown key {path}{nearest(path, public)}")
        if one is not None and one.fixed:
            raise invalid(f"unknown key {path}, which is not a setting: {one.fixed}")
        if not any(map(view.reads, within)):
            raise invalid(f"unknown key {path}: {view.command} does not read it")


def _paths(values: Mapping[str, Any], whole: Mapping[str, Setting], prefix: str = "") -> Iterator[str]:
    """The paths of all keys of nested values; not of those within a setting that is itself a mapping."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        leaf = path in whole and not whole[path].is_section
        if isinstance(value, dict) and not leaf:
            if not value:
                yield path
            yield from _paths(value, whole, f"{path}.")
        else:
            yield path


def _variables(view: View, environment: Mapping[str, str]) -> dict[str, str]:
    """The values of the view's variables, by path."""
    found = {one.path: (one.variable, environment.get(one.variable or "")) for one in view.settings}
    return {
        path: value
        for path, (name, value) in found.items()
        if name is not None and value is not None and not is_service_link(name, value)
    }


def _override(values: dict[str, Any], source: Mapping[str, object]) -> None:
    """Sets what a source has, in place of what earlier ones had; a secret in place of the file of one, too,
    and the reverse."""
    for secret, file in SECRET_FILES.items():
        if (secret in source) != (file in source):
            _remove(values, file if secret in source else secret)
    for path, value in source.items():
        _put(values, path, value)


def _put(values: dict[str, Any], path: str, value: object, *, keep: bool = False) -> None:
    """Sets one setting; with `keep`, only where it has no value. A section that is not a mapping is left for
    validation to report."""
    *sections, key = path.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            return
        values = inner
    if not (keep and key in values):
        values[key] = value


def _get(values: Mapping[str, Any], path: str) -> Any:  # noqa: ANN401
    """The value of a setting, None where there is none."""
    *sections, key = path.split(".")
    for section in sections:
        inner = values.get(section)
        values = inner if isinstance(inner, dict) else {}
    return values.get(key)


def _remove(values: dict[str, Any], path: str) -> None:
    *sections, key = path.split(".")
    for section in sections:
        inner = values.get(section)
        values = inner if isinstance(inner, dict) else {}
    values.pop(key, None)


def _require(values: Mapping[str, Any], view: View) -> None:
    """Raises for the first setting that the view requires and nothing has given."""
    for path in view.required:
        file = SECRET_FILES.get(path)
        if _get(values, path) is None and (file is None or _get(values, file) is None):
            named = {
                one.path: f"{one.path} ({one.flag})" if one.flag and view.keys else one.path
                for one in view.settings
            }
            own = [named.get(name, name) for name in (path, file) if name and (name in named or not file)]
            raise invalid(f"{' or '.join(own)} is missing: {view.command} needs it")


def _with_secrets(values: dict[str, Any], settings: Settings, view: View) -> Settings:
    """The settings with the content of files of secrets in place of the settings that name them."""
    found: dict[str, str] = {}
    for path, file in SECRET_FILES.items():
        named: Path | None = _attribute(settings, file)
        if named is None or path not in view.secrets:
            continue
        if _attribute(settings, path) is not None:
            raise invalid(f"{path} and {file} are both set")
        found[path] = (read_secret_file if path == "state.redis_url" else read_shared_secret)(named, file)
    if (together := settings.supervision.secrets_file) is not None and view.secrets:
        found |= _secrets_together(together, settings)
    for path, secret in found.items():
        _put(values, path, secret)
    return validated(values) if found else settings


def _secrets_together(file: Path, settings: Settings) -> dict[str, str]:
    """The secrets of a `secrets_file`, by path. Raises where one has another value elsewhere."""
    found = {SECRETS[name]: secret for name, secret in read_secrets(file).items()}
    for path, secret in found.items():
        if _attribute(settings, path) not in (None, secret):
            name = path.rpartition(".")[2]
            raise invalid(f"{name} in secrets_file {file} differs from the one that is set elsewhere")
    return found


def _attribute(settings: Settings, path: str) -> Any:  # noqa: ANN401
    value: object = settings
    for part in path.split("."):
        value = getattr(value, part)
    return value
