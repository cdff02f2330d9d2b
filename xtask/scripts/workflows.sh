#!/usr/bin/env bash
# workflows.sh [--pins]: checks the workflows of GitHub: they can only read, name each action by its commit, and bound each job. Without
# `--pins` then also by actionlint, which is built from its Go module, without the linters of shell and Python that this machine may have.
. "$(dirname "$0")/common.sh"
! grep -HnE '\buses:' .github/workflows/* | grep -vE 'uses: [^ ]+@[0-9a-f]{40} # v[0-9]' || fail "write each action as NAME@COMMIT # VERSION"
! grep -HnE ":\\s*[\"']?write" .github/workflows/* || fail "a workflow can only read"
for file in .github/workflows/*; do
  count() { grep -cE "$1" "$file" || true; }
  [[ $(grep -A1 '^permissions:$' "$file") == *$'\n  contents: read' ]] || fail "$file: write permissions of \`contents: read\` for the workflow"
  (($(count 'actions/checkout@') == $(count '^ +persist-credentials: false$'))) || fail "$file: set persist-credentials to false at each checkout"
  (($(count '^ +runs-on:') == $(count '^ +timeout-minutes:'))) || fail "$file: give each job timeout-minutes"
done
[[ ${1:-} != --pins ]] || exit 0
need_go
mkdir -p "$target/tools"
(cd xtask/actionlint && "$go" build -trimpath -ldflags='-s -w' -o "$target/tools/actionlint" github.com/rhysd/actionlint/cmd/actionlint)
"$target/tools/actionlint" -no-color -shellcheck= -pyflakes= .github/workflows/*.yml
