#!/usr/bin/env bash
# fuzz.sh [--seconds=N] [TARGET]: runs the fuzz targets, or one of them, for a bounded time each; a target keeps one core busy. New inputs
# go below target/; adding one to the recorded corpus, which plain tests replay on stable, is a manual step.
. "$(dirname "$0")/common.sh"
seconds=60 only=
while (($#)); do
  case $1 in
    --seconds) seconds=$2 && shift ;;
    --seconds=*) seconds=${1#*=} ;;
    *) only=$1 ;;
  esac
  shift
done
[[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "--seconds takes a number, not $seconds"
nightly rustc --version >/dev/null 2>&1 || skip 'no nightly toolchain: `rustup toolchain install nightly --profile minimal`'
tools=$target/tools
export PATH=$tools/bin:$PATH
if ! nightly cargo fuzz --version >/dev/null 2>&1; then
  [[ ${CI:-false} != false ]] || skip 'cargo-fuzz is not installed: `cargo install cargo-fuzz --locked`'
  # A target folder of its own: other steps lock the workspace's.
  CARGO_TARGET_DIR=$tools/build cargo install --quiet --locked cargo-fuzz --root "$tools"
fi
# cargo-fuzz looks for a folder `fuzz` in its working folder.
cd tunnel-daemon
targets=$(basename --suffix=.rs fuzz/fuzz_targets/*.rs)
if [[ $only ]]; then
  grep --quiet --line-regexp --fixed-strings -- "$only" <<<"$targets" || fail "no fuzz target $only; there are:" $targets
  targets=$only
fi
nightly cargo fuzz build
fuzz() {
  local fresh=$root/target/fuzz-corpus/$1 corpus=fuzz/corpus/$1
  [[ -d $corpus ]] || corpus=
  mkdir -p "$fresh"
  # The first folder receives new inputs; the others are read-only.
  nightly cargo fuzz run "$1" "$fresh" $corpus -- "-max_total_time=$seconds" -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1 -verbosity=0 || { echo "FAILED fuzz $1" && return 1; }
}
export -f fuzz nightly
export root seconds
xargs --max-procs="$(nproc)" --replace bash -c 'fuzz {}' <<<"$targets"
