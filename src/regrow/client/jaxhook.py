"""Installs the hooks as soon as JAX is imported, and costs nothing in a process that never does."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Final, final

from regrow.client.notice import say
from regrow.client.settings import TARGET_VARIABLE, Settings
from regrow.errors import UsageError

_MODULE: Final = "jax"
_settings: Settings | None = None


def active() -> Settings | None:
    """The cluster that JAX in this process is, or will be, a client of."""
    return _settings


def activate(settings: Settings) -> None:
    """Makes JAX a client of that cluster: at once if it is imported, else when it will be."""
    global _settings
    _settings = settings
    when_imported(_install)


def when_imported(install: Callable[[], None]) -> None:
    """Has `install` run in JAX: at once if it is imported, else when it will be."""
    jax = sys.modules.get(_MODULE)
    if jax is not None and not _being_imported(jax):
        install()
    else:
        finder(install)


def activate_from_environ() -> importlib.abc.MetaPathFinder:
    """Makes JAX, which is not imported yet, a client of the cluster that the environment names.

    Returns:
        What finds JAX's module and installs the hooks into it.

    Raises:
        UsageError: The environment names no cluster, or one that cannot be.
    """
    settings = _settings or Settings.from_environ()
    if settings is None:
        raise UsageError(f"{TARGET_VARIABLE} is not set")
    activate(settings)
    return finder(_install)


def finder(install: Callable[[], None]) -> importlib.abc.MetaPathFinder:
    """What finds JAX's module, which is not imported yet, and runs `install` when that has run."""
    for one in sys.meta_path:
        if isinstance(one, _Finder) and one.install is install:
            return one
    made = _Finder(install)
    sys.meta_path.insert(0, made)
    return made


def _being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _install() -> None:
    if _settings is not None:
        from regrow.client import hooks

        hooks.install(_settings)


@final
class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find JAX, and runs the installation after its module has run."""

    def __init__(self, install: Callable[[], None]) -> None:
        self.install = install
        self._searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(self, spec.loader)
        return spec


@final
class _Loader(importlib.abc.Loader):
    """Runs JAX's own loader, then the installation."""

    def __init__(self, finder: _Finder, loader: importlib.abc.Loader) -> None:
        self._finder = finder
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Whoever looks at the module (importlib.resources, say) must see its own loader.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        try:
            self._finder.install()
        except Exception as error:  # noqa: BLE001 (JAX itself is fine, and the script may not need it)
            say(f"JAX in this process is not joined to what its environment names: {error}")
