"""Generate orchestrrl/rpc/pb from proto/, or check that it is up to date (--check).

Run it as `python -m orchestrrl.rpc.generate` in the development environment. protoc derives folders and imports from
the proto package `orchestrrl.v1`, and such a folder would shadow the Python package `orchestrrl`. The files are
therefore placed directly in rpc/pb, and their imports are rewritten.
"""

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROTO = ROOT / "proto"
TARGET = ROOT / "orchestrrl" / "rpc" / "pb"


def generate(target: Path) -> None:
    """Write the generated modules into the folder `target`."""
    from grpc_tools import protoc  # type: ignore[import-untyped]

    sources = sorted(str(p.relative_to(PROTO)) for p in PROTO.glob("orchestrrl/v1/*.proto"))
    with tempfile.TemporaryDirectory() as raw_dir:
        arguments = ["protoc", f"-I{PROTO}", f"--python_out={raw_dir}", f"--grpc_python_out={raw_dir}"]
        plugins = Path(sys.executable).parent
        for name in ("mypy", "mypy_grpc"):
            arguments += [
                f"--plugin=protoc-gen-{name}={plugins / f'protoc-gen-{name}'}",
                f"--{name}_out=quiet:{raw_dir}",
            ]
        if protoc.main([*arguments, *sources]) != 0:
            raise SystemExit("protoc failed; see its messages above")
        for path in sorted(Path(raw_dir, "orchestrrl", "v1").iterdir()):
            (target / path.name).write_text(_flatten(path.read_text()))
    (target / "__init__.py").write_text('"""Generated from proto/ by `make generate`; do not edit."""\n')


def _flatten(source: str) -> str:
    source = source.replace("from orchestrrl.v1 import", "from orchestrrl.rpc.pb import")
    source = re.sub(r"'orchestrrl\.v1\.(\w+_pb2)'", r"'orchestrrl.rpc.pb.\1'", source)
    # Stubs write `import orchestrrl.v1.x_pb2` (possibly aliased) and use the dotted name in annotations.
    source = re.sub(r"^import orchestrrl\.v1\.(\w+)$", r"from orchestrrl.rpc.pb import \1", source, flags=re.MULTILINE)
    source = re.sub(r"^from orchestrrl\.v1\.(\w+) import", r"from orchestrrl.rpc.pb.\1 import", source, flags=re.M)
    return re.sub(r"(?<![\w./])orchestrrl\.v1\.(\w+_pb2)", r"\1", source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with status 1 if rpc/pb differs from the code generated from proto/",
    )
    is_check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as fresh_dir:
        generate(Path(fresh_dir))
        if not is_check:
            shutil.copytree(fresh_dir, TARGET, dirs_exist_ok=True)
            return
        found = filecmp.dircmp(fresh_dir, TARGET, ignore=["__pycache__"])
        stale = sorted({*found.left_only, *found.right_only, *found.diff_files})
    if stale:
        raise SystemExit(f"generated code differs from proto/: {', '.join(stale)}; run `make generate`")


if __name__ == "__main__":
    main()
