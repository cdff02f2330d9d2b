#!/usr/bin/env bash
# setup.sh [--force]: installs the git hooks of this repository; --force replaces hooks that this script did not write.
. "$(dirname "$0")/common.sh"
mark='# Installed by `cargo xtask setup`.'
hooks=$(git rev-parse --git-path hooks)
mkdir -p "$hooks"
hook() {
  local file=$hooks/$1
  [[ ! -s $file || ${force:-} ]] || grep --quiet --fixed-strings "$mark" "$file" ||
    fail "$file is not ours: merge it by hand, or run again with --force"
  printf '#!/bin/sh\n%s\nset -e\n%s\n' "$mark" "$2" >"$file"
  chmod 755 "$file"
  echo "installed $1"
}
case ${1:-} in --force) force=yes ;; "") ;; *) fail "no option $1" ;; esac
hook pre-commit $'cargo fmt --all --check\ncargo xtask tidy'
hook pre-push 'cargo xtask ci --quick'
