"""Make the stubs under proto/v1 from the .proto files. Needs grpcio-tools; run as `make proto`.

The files are compiled under the path baton/proto/v1, so that the stubs import each other inside
this package; the protobuf package they declare is `baton.v1`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
WITH_SERVICES = {"inference", "node"}


def generate(out: Path) -> None:
    """Write all stubs into the folder `out`."""
    from grpc_tools import protoc

    sources = sorted(path.name for path in (HERE / "v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        arguments = ["protoc", f"-Ibaton/proto={HERE}"]
        arguments += [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        arguments += [f"baton/proto/v1/{name}" for name in sources]
        if protoc.main(arguments) != 0:  # type: ignore[no-untyped-call]
            raise SystemExit("protoc failed")
        for stub in sorted(Path(scratch, "baton/proto/v1").iterdir()):
            name = stub.stem.removesuffix("_grpc").removesuffix("_pb2")
            if stub.stem.endswith("_grpc") and name not in WITH_SERVICES:
                continue
            (out / stub.name).write_text(stub.read_text())


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "v1")
