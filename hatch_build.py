"""The package build compiles the native kernels where there is a C++ compiler.

Without one, or with DSPARK_NATIVE_BUILD=0, the wheel is pure Python and the kernels are compiled on
first use. An editable install has the library beside the sources; one of other sources is not used.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "dspark/models/targets/native"


class NativeKernelsHook(BuildHookInterface[Any]):
    """Adds the library to a wheel, which is then one for this platform, or to the source tree."""

    _room: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if os.environ.get("DSPARK_NATIVE_BUILD") == "0":
            return
        compiling = _module(Path(self.root) / "models" / NATIVE / "compiling.py")
        try:
            compiler = compiling.find_compiler()
            if compiler is None:
                raise compiling.CannotCompile("there is no C++ compiler")
            if version == "editable":
                compiling.compile_library(compiling.SOURCE.parent / compiling.LIBRARY, compiler)
                return
            self._room = tempfile.mkdtemp()
            library = Path(self._room) / compiling.LIBRARY
            compiling.compile_library(library, compiler)
        except compiling.CannotCompile as why:
            self.app.display_warning(f"without native kernels, they follow on first use: {why}")
            return
        build_data["force_include"][str(library)] = f"{NATIVE}/{compiling.LIBRARY}"
        build_data["pure_python"] = False
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{system}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._room:
            shutil.rmtree(self._room, ignore_errors=True)


def _module(file: Path) -> ModuleType:
    """A module of the package by its file: the package itself cannot be imported yet."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
