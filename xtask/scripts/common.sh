# Sourced by each script of this folder. `cargo xtask` runs them, and people can do so by hand: `bash xtask/scripts/miri.sh`.
set -euo pipefail
export LC_ALL=C
umask 022
root=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
cd "$root"
target=$(realpath --canonicalize-missing "${CARGO_TARGET_DIR:-target}")
go=${ADIT_GO:-go}

# Ends a script that cannot run here, with the reason. `cargo xtask` names the file that takes it.
skip() {
  echo "$*" >>"${SKIPPED_TO:-/dev/stderr}"
  exit 77
}

fail() {
  echo "error: $*" >&2
  exit 1
}

# Skips unless all these programs are installed.
need() {
  local tool
  for tool; do
    command -v "$tool" >/dev/null || skip "$tool is not installed"
  done
}

need_go() {
  "$go" version >/dev/null 2>&1 || skip "no Go toolchain, \`$go version\` fails: install Go 1.26 or newer, or name it in ADIT_GO"
}

# Runs a command of the nightly toolchain, without what the pinned one has set.
nightly() {
  env -u CARGO -u RUSTUP_TOOLCHAIN -u RUSTC -u RUSTDOC rustup run nightly "$@"
}
