#!/usr/bin/env bash
# names.sh [--check]: writes the addresses of Cargo.toml, and the version, into deploy/chart, and the addresses into all tracked text files
# that have those of the chart. `--check` fails where the chart has other ones, or an image below deploy or docs another registry.
. "$(dirname "$0")/common.sh"
chart=deploy/chart/Chart.yaml values=deploy/chart/values.yaml icon=docs/icon.svg

# What the brackets match in the first line of this form.
value() {
  local value
  value=$(sed -nE "\\|^$2\$|{s||\\1|p;q}" "$1")
  [[ $value =~ ^[[:alnum:]._~:/-]*[[:alnum:]]$ ]] ||
    fail "$1: write \`${2/(.*)/ADDRESS}\`, without spaces, quotes or a slash at the end of ADDRESS, which is now \"$value\""
  echo "$value"
}
home=$(value Cargo.toml 'homepage = "(.*)"')
sources=$(value Cargo.toml 'repository = "(.*)"')
registry=$(value Cargo.toml 'registry = "(.*)"')
version=$(value Cargo.toml 'version = "(.*)"')
lines="s|^(version: ).*|\1$version|; s|^(appVersion: ).*|\1\"$version\"|; s|^(home: ).*|\1$home|; s|^(sources: ).*|\1[$sources]|
  s|^(icon: ).*|\1$home/$icon|; s|^(      image: ).*/adit:.*|\1$registry/adit:$version|; s|^(  repository: ).*/adit\$|\1$registry/adit|"
old_home=$(value $chart 'home: (.*)')
old_sources=$(value $chart 'sources: \[(.*)]')
old_registry=$(value $values '  repository: (.*)/adit')

[[ -z ${1:-} || $1 == --check ]] || fail "no option $1"
if [[ ${1:-} ]]; then
  wrong=$(
    [[ -f $icon ]] || echo "$icon: no such file, which $chart names"
    (($(grep -cE '^(version|appVersion|icon|      image): ' $chart) == 4)) || echo "$chart: not one line each of version, appVersion, icon and image"
    for file in $chart $values; do
      diff --unchanged-line-format= --old-line-format="$file:%dn: %L" --new-line-format="  should be: %L" $file <(sed -E "$lines" $file) || true
    done
    grep -rnoEI '[[:alnum:]._:/-]*/adit[a-z-]*:[0-9]' deploy docs | grep -vE "^[^:]*:[0-9]+:(.*//)?${registry//./\\.}/adit[^/]*$" || true
  )
  [[ ! $wrong ]] || fail "Cargo.toml has other addresses: run \`cargo xtask names\`, and change by hand what it leaves:"$'\n'"$wrong"
  exit
fi

# One address may contain another, old or new: the longest goes first, and all are marked before the first is written.
old=([1]=$old_home $old_sources $old_registry) new=([1]=$home $sources $registry)
edits=$(
  for i in 1 2 3; do echo "${#old[i]} s|${old[i]//./\\.}|\\x0$i|g"; done | sort -rns | cut -d' ' -f2-
  for i in 1 2 3; do echo "s|\\x0$i|${new[i]}|g"; done
)
git grep -lzIF -e "$old_home" -e "$old_sources" -e "$old_registry" -- . ':!Cargo.toml' | xargs -0 sed -i "$edits"
sed -i -E "$lines" $chart $values
