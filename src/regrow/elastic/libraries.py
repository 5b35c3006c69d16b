"""The optional libraries, with an error that says how to get them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from regrow.errors import UnsupportedError


def pathwaysutils(module: str) -> Any:
    """A module of pathwaysutils.

    Raises:
        UnsupportedError: pathwaysutils is not installed, or has no such module.
    """
    name = f"pathwaysutils.{module}"
    try:
        return import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"regrow.elastic needs {name}, which cannot be imported ({error}); it comes with: "
            "pip install 'regrow[elastic]'"
        ) from error
