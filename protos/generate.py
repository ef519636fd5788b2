"""Generate the Python code of dspark/v1/*.proto: `python protos/generate.py [OUTPUT_DIR]`.

Without OUTPUT_DIR the code lands beside the .proto files, where it is committed. What comes out
depends on the versions of grpcio-tools and mypy-protobuf, which pyproject.toml pins.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

SOURCE = Path(__file__).resolve().parent


def generate(output: Path) -> None:
    """Write messages, stubs and their types to output/dspark/v1; RuntimeError if protoc fails."""
    scripts = Path(sysconfig.get_path("scripts"))
    command = [
        "protoc",
        f"--proto_path={SOURCE}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        # By path: the virtual environment need not be active, so PATH may not hold the plugins.
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--python_out={output}",
        f"--grpc_python_out={output}",
        f"--mypy_out=quiet:{output}",
        f"--mypy_grpc_out=quiet:{output}",
        *(str(path.relative_to(SOURCE)) for path in sorted(SOURCE.glob("dspark/v1/*.proto"))),
    ]
    status = protoc.main(command)
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(f"usage: {sys.argv[0]} [OUTPUT_DIR]")
    generate(Path(sys.argv[1]) if len(sys.argv) == 2 else SOURCE)
