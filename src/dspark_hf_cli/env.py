"""`dspark-hf env`."""

from __future__ import annotations

import json as json_module

import typer

from .options import Json


def env(json: Json = False) -> None:
    """Print what a bug report needs: versions, machine and devices."""
    from dspark_hf.evaluation.environment import environment

    found = environment()
    if json:
        typer.echo(json_module.dumps(found, indent=2))
        return
    typer.echo("Copy this into your report:\n")
    for name, value in found.items():
        if name == "packages":
            for package, version in value.items():
                typer.echo(f"- {package}: {version or 'not installed'}")
        else:
            typer.echo(f"- {name}: {', '.join(map(str, value)) or 'none' if isinstance(value, list) else value}")
