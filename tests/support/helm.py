"""Helm for tests: that of this machine, or this program, which does the same with the package helm-python-sdk."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path


def path_with_helm(directory: Path) -> str:
    """Return a PATH on which there is a helm, and what else the Python environment has; "" if there is none."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which("helm", path=path):
        return path
    if importlib.util.find_spec("helm_python") is None:
        return ""
    program = directory / "helm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    program.chmod(0o755)
    return f"{directory}{os.pathsep}{path}"


def main() -> None:
    """Do what the command line says."""
    import helm_python

    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["template", "install", "upgrade", "uninstall"])
    parser.add_argument("release")
    parser.add_argument("chart", nargs="?")
    parser.add_argument("--values", choices=["-"])
    parser.add_argument("--show-only")
    parser.add_argument("--ignore-not-found", action="store_true")
    asked = parser.parse_args()
    values = json.load(sys.stdin) if asked.values else {}
    try:
        if asked.what == "template":
            with helm_python.Chart.load(asked.chart) as chart:
                chart.validate_schema(values)
                texts = chart.render(values, name=asked.release, namespace="default")
            for name, text in texts.items():
                if text.strip() and name.endswith(asked.show_only or ""):
                    print(f"---\n# Source: {name}\n{text}")
            return
        with helm_python.Config(namespace="default", kubeconfig_path=os.environ["KUBECONFIG"]) as config:
            if asked.what == "uninstall":
                config.uninstall(asked.release, ignore_not_found=asked.ignore_not_found)
            else:
                getattr(config, asked.what)(asked.chart, asked.release, values)
    except helm_python.HelmError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()
