#!/usr/bin/env bash
# Checks the workflows of GitHub by actionlint, which is built from its Go module. Whatever linters of shell and Python this machine has
# are left out, so that all machines find the same.
. "$(dirname "$0")/common.sh"
need_go
mkdir -p "$target/tools"
(cd xtask/actionlint && "$go" build -trimpath -ldflags='-s -w' -o "$target/tools/actionlint" github.com/rhysd/actionlint/cmd/actionlint)
"$target/tools/actionlint" -no-color -shellcheck= -pyflakes= .github/workflows/*.yml
