#!/bin/sh
# Runs the GPU programme on a machine without a network, whose Python has torch and not all that fullshard needs.
#
#   sh bench/gpu/start.sh collect WHEELS      on a machine with a registry: downloads wheels for Python 3.12
#   sh bench/gpu/start.sh run WHEELS ARGUMENTS…   installs those that are missing beside them, then python -m bench.gpu
#
# PYTHON chooses the interpreter (python3), PYTHON_VERSION that of the wheels (3.12).
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
command=${1:-} wheels=${2:-}
if [ -z "$wheels" ]; then
  sed -n '2,7p' bench/gpu/start.sh >&2
  exit 2
fi
mkdir -p "$wheels"
wheels=$(cd "$wheels" && pwd)
shift 2

case $command in
collect)
  # Exactly the versions that pydantic, tyro and transformers need, and of the others the package alone: torch is there.
  download() {
    "$PYTHON" -m pip download --quiet --disable-pip-version-check --only-binary :all: -d "$wheels" \
      --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 "$@"
  }
  download "pydantic>=2.12" tyro hypothesis pytest-timeout xxhash pyyaml typer safetensors "transformers>=4.57"
  rm -f "$wheels"/numpy-*.whl  # torch's own
  download --no-deps "torchao>=0.18" "torchtitan==0.2.*" torchdata
  ls "$wheels"
  ;;
run)
  installed=$wheels/installed
  if [ ! -f "$installed/done" ]; then
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target "$installed" "$wheels"/*.whl
    touch "$installed/done"
  fi
  PYTHONPATH="$PWD/src:$installed${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" -m bench.gpu "$@"
  ;;
*) echo "start.sh: $command is neither collect nor run" >&2; exit 2 ;;
esac
