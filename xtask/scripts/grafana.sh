#!/usr/bin/env bash
# grafana.sh DASHBOARD: reads a dashboard strictly by Grafana's own schema, with a Go program that has the types which Grafana generates.
. "$(dirname "$0")/common.sh"
need_go
mkdir -p "$target/grafana"
(cd xtask/grafana && "$go" build -trimpath -o "$target/grafana/check" .)
"$target/grafana/check" "$1"
