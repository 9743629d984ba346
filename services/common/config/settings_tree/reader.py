"""The one reader of settings: a view's file, environment, flags and files of secrets become a `Settings`.

Flags override variables, which override the file, which overrides the view's own defaults. Files of secrets
are read last, each in place of the setting that names it. Unknown keys are refused, and so are keys that are
no settings any more; unknown `BATON_…` variables are a warning.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from baton.base.errors import BatonError, ErrorKind
from baton.base.utf8 import is_utf8
from services.common.config.settings_tree.listing import Setting, settings_of, without_links
from services.common.config.settings_tree.secret_files import read_secret_file, read_shared_secret
from services.common.config.settings_tree.settings import Settings
from services.common.config.settings_tree.variables import is_service_link, unknown_variables
from services.common.config.settings_tree.views import SECRET_FILES, View

# Secrets that a `secrets_file` holds together, by name.
SECRETS: Mapping[str, str] = {path.rpartition(".")[2]: path for path in SECRET_FILES}
_TREE = {one.path: one for one in settings_of()}
# Sections whose values are not repeated in errors: they may hold a password.
_PRIVATE = ("state", "auth", "prefix_secret", "cluster_secret", "tracing")


def add_flags(
    parser: argparse.ArgumentParser, view: View, *, file: bool | None = True, usage: str = ""
) -> None:
    """Adds the flags of a view's settings, by section, and `--config`: required where `file` is True,
    optional where it is False, none at all where it is None. `usage`: the command's own required flags."""
    own = f"{usage} " if usage else ""
    if file is not None:
        add_config_flag(parser, "YAML file of settings; its keys are listed below", required=file)
        parser.epilog = "Keys of FILE: " + ", ".join(one.path for one in view.settings if not one.fixed) + "."
        own += "-c FILE " if file else "[-c FILE] "
    parser.usage = f"%(prog)s {own}[FLAGS]"
    sections: dict[str, Callable[..., object]] = {}
    for one in view.settings:
        if one.flag:
            name = one.path.partition(".")[0] if "." in one.path else "general"
            if name not in sections:
                sections[name] = parser.add_argument_group(f"settings: {name}").add_argument
            _add_flag(sections[name], one)


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
    values = _flat(read_yaml(arguments.config)) if arguments.config else {}
    _refuse_keys(values, view)
    for line in unknown_variables(environment, [one.variable for one in _TREE.values() if one.variable]):
        warn(line)
    flags = {one.path: getattr(arguments, one.key, None) for one in view.settings if one.flag}
    for source in (_variables(view, environment), flags, given or {}):
        _override(values, {path: value for path, value in source.items() if value is not None})
    return _settings(view, values)


def read_values(view: View, values: Mapping[str, Any]) -> Settings:
    """The settings of nested values alone, such as a part of a file. Raises `BatonError(INVALID)`."""
    _refuse_keys(flat := _flat(values), view)
    return _settings(view, flat)


def _settings(view: View, given: Mapping[str, Any]) -> Settings:
    """The settings of values by path, and the view's defaults."""
    values = {**view.defaults, **given}
    for path, value in values.items():
        if not isinstance(value, str):
            continue
        if "\0" in value:  # no path, address or secret has one, and system calls refuse it
            raise invalid(f"{path} has a NUL character")
        if not is_utf8(value):
            raise invalid(f"{path} is not UTF-8")
    _require(values, view)
    _validated(values)  # before files are read that it names
    return _validated(values | _secrets(values, view))


class _SettingsLoader(yaml.SafeLoader):
    """Loads YAML in which `on`, `off`, `yes` and `no` are text, as they are in YAML 1.2: some settings have
    such values, and those that are true or false take the words, too."""


_BOOL = "tag:yaml.org,2002:bool"
_SettingsLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_SettingsLoader.add_implicit_resolver(_BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), "tTfF")


def read_yaml(path: Path, *, secret: bool = False, what: str = "") -> dict[str, Any]:
    """The mapping of a YAML file; errors begin with `what`, and with `secret` do not quote the file. Raises
    `BatonError(INVALID)`."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _SettingsLoader)  # noqa: S506 (a SafeLoader)
    except OSError as error:
        raise invalid(f"cannot read {what}{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = "" if secret else f": {' '.join(str(error).split())}"
        raise invalid(f"{what}{path} is not valid YAML{reason}") from None
    except RecursionError:
        raise invalid(f"{what}{path} is nested too deeply") from None
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


def _validated(values: Mapping[str, Any]) -> Settings:
    try:
        return Settings.model_validate(_nested(values))
    except ValidationError as error:
        raise invalid(first_problem(error)) from None


def invalid(message: str) -> BatonError:
    """An operator's mistake: commands print the message and exit with code 2."""
    return BatonError(ErrorKind.INVALID, message)


def first_problem(error: ValidationError, section: str = "", *, values: bool = True) -> str:
    """The first of a validation's errors, in one line that names key and flag, and with `values` the value,
    unless it may be a secret. `section`: the path of what was validated."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in (section, *first["loc"]) if part != "")
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    if first["type"] == "missing":
        return f"{key} is missing"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key}"
    flag = _TREE[key].flag if key in _TREE else None
    place = f"{key} ({flag})" if flag else key
    shown = "" if key.startswith(_PRIVATE) or not values else f" is {first['input']!r}"
    return f"{place}{shown}: {first['msg'][0].lower()}{first['msg'][1:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns "(did you mean …?)" if a known path is near to a name that is not known: in its last part, or
    in its last two, as in `engine_slots`."""
    ends: dict[str, str] = {}
    for path in known:
        parts = path.split(".")
        ends.setdefault(parts[-1], path)
        ends.setdefault("_".join(parts[-2:]), path)
    found = difflib.get_close_matches(name.rpartition(".")[2], ends, 1, 0.7)
    return f" (did you mean {ends[found[0]]}?)" if found else ""


def _add_flag(add: Callable[..., object], one: Setting) -> None:
    bare = "true" if bool in one.types else None
    kind = "true|false" if bare else "|".join(one.choices) or one.unit.upper().partition(" ")[0]
    sentence = without_links(one.sentence).replace("%", "%%")
    add(
        one.flag or "",
        dest=one.key,
        metavar="none" if one.is_section else "RATIO" if kind.isdigit() else kind,
        help=f"{sentence} (default {one.default})" if one.default else sentence,
        nargs="?" if bare else None,
        const=bare,
    )
    if one.field.default is True:
        no = f"--no-{one.key.replace('_', '-')}"
        add(no, dest=one.key, action="store_const", const="false", help="the reverse of it")


def _refuse_keys(values: Mapping[str, Any], view: View) -> None:
    """Raises for the first path that the view does not read."""
    of_roles = values.get("engine_of_role")
    for engine in of_roles.values() if isinstance(of_roles, dict) else ():
        _refuse_keys(_flat({"engine": engine}), view)
    for path in values:
        one = _TREE.get(path)
        within = [known for known in _TREE if known == path or known.startswith(f"{path}.")]
        if not within:
            public = [known.path for known in view.settings if not known.fixed]
            raise invalid(f"unknown key {path}{nearest(path, public)}")
        if one is not None and one.fixed:
            raise invalid(f"unknown key {path}, which is not a setting: {one.fixed}")
        if not any(map(view.reads, within)):
            raise invalid(f"unknown key {path}: {view.command} does not read it")


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Maps nested values to their paths."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        is_setting = path in _TREE and not _TREE[path].is_section
        inner = value if isinstance(value, dict) and not is_setting else {}
        flat |= _flat(inner, f"{path}.") or {path: value}
    return flat


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The reverse of `_flat`. A section that is not a mapping is left for validation to report."""
    nested: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        inner = nested
        for section in sections:
            below = inner.get(section, {})
            if not isinstance(below, dict):
                break
            inner[section] = dict(below)  # of its own: two roles in a file may have the same one
            inner = inner[section]
        else:
            inner[key] = value or inner.get(key, value)
    return nested


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
    and the reverse; a section in place of what is in it."""
    for secret, file in SECRET_FILES.items():
        if (secret in source) != (file in source):
            values.pop(file if secret in source else secret, None)
    for path in [path for path in values if path.rpartition(".")[0] in source]:
        del values[path]
    values |= source


def _require(values: Mapping[str, Any], view: View) -> None:
    """Raises for the first setting that the view requires and nothing has given."""
    flags = {one.path: f"{one.path} ({one.flag})" for one in view.settings if one.flag and view.keys}
    for path in view.required:
        named = [name for name in (path, SECRET_FILES.get(path)) if name and view.reads(name)]
        within = (key for key in values if key.startswith(f"{path}."))
        if all(values.get(name) is None for name in named) and not any(within):
            own = " or ".join(flags.get(name, name) for name in named)
            raise invalid(f"{own} is missing: {view.command} needs it")


def _secrets(values: Mapping[str, Any], view: View) -> dict[str, str]:
    """The content of the files of secrets that `values` name, by the path of the secret."""
    found: dict[str, str] = {}
    for path, file in SECRET_FILES.items():
        if values.get(file) is None or path not in view.secrets:
            continue
        if values.get(path) is not None:
            raise invalid(f"{path} and {file} are both set")
        read_one = read_secret_file if path == "state.redis_url" else read_shared_secret
        found[path] = read_one(Path(values[file]), file)
    together = values.get("supervision.secrets_file") if view.secrets else None
    for name, secret in read_secrets(Path(together)).items() if together is not None else ():
        path = SECRETS[name]
        if {**values, **found}.get(path) not in (None, secret):
            raise invalid(f"{name} in secrets_file {together} differs from the one that is set elsewhere")
        found[path] = secret
    return found
