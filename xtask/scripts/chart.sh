#!/usr/bin/env bash
# chart.sh write | check | render FOLDER | package FOLDER: the Helm chart below deploy/chart, and the manifests below deploy/manifests that are
# made from it. Each file of deploy/chart/ci is a combination of values that must pass, each file of ci/fail one that must fail. `render`
# leaves the renderings and Helm in a folder, and `package` packs the chart. Helm itself is built from its Go module.
#
# Comments at the top of a file of values say what is to come of it: `# namespace: NAME`, `# manifest` (the rendering is kept),
# `# template: FILE` (the only one to render, of deploy/manifests/templates), `# has: FILE` (the rendering contains that file, at any
# indent), `# renders: TEXT` and `# lacks: TEXT` (a line of the rendering has TEXT, or none has), `# fails: TEXT` (part of the message).
# Others describe the combination.
. "$(dirname "$0")/common.sh"
need_go
mode=$1 folder=$target/chart
[[ $mode != render ]] || folder=$2
mkdir -p "$folder"
echo "chart: building helm"
(cd xtask/helm && "$go" build -trimpath -ldflags='-s -w' -o "$folder/helm" helm.sh/helm/v3/cmd/helm)
if [[ $mode == package ]]; then
  "$folder/helm" package deploy/chart --destination "$2"
  exit
fi
rm -rf "$folder/with-templates" "$folder/rendered"
mkdir "$folder/rendered"
cp -rL deploy/chart "$folder/with-templates"
cp deploy/manifests/templates/* "$folder/with-templates/templates"

comments() {
  sed -n '/^# /!q; s/^# //p' "$1"
}

comment() {
  comments "$2" | sed -n "s/^$1: //p"
}

# Runs Helm for values, with nothing of a cluster or of the user's own Helm. Templates of manifests are no objects of a release, so only
# the chart itself is linted.
helm() {
  local chart=deploy/chart namespace
  [[ $1 != template || -z $(comment template "$2") ]] || chart=$folder/with-templates
  namespace=$(comment namespace "$2")
  KUBECONFIG=/dev/null "$folder/helm" $1 ${3:-} "$chart" --kube-version 1.30.0 --namespace "${namespace:-kube-system}" --values "$2" "${@:4}"
}

without_indent() {
  sed 's/^[[:space:]]*//; s/[[:space:]]*$//; /^$/d' "$1"
}

passing=0 failing=0
for values in deploy/chart/ci/*.yaml; do
  name=$(basename "$values") rendered=$folder/rendered/$(basename "$values") template=$(comment template "$values")
  said=$(helm lint "$values" '' --strict 2>&1) || fail "$values: $said"
  helm template "$values" adit ${template:+--show-only "templates/$template"} >"$rendered" 2>"$folder/said" ||
    fail "$values: $(cat "$folder/said")"
  passing=$((passing + 1))
  [[ $mode != render ]] || continue
  # The chart leaves out an object whose file is missing, so the rendering itself must show that the file is there.
  for file in $(comment has "$values"); do
    [[ -s $file && $(without_indent "$rendered") == *"$(without_indent "$file")"* ]] || fail "the rendering of $values lacks $file"
  done
  text=$(comment renders "$values")
  [[ -z $text ]] || grep --quiet --fixed-strings -- "$text" "$rendered" || fail "the rendering of $values lacks $text"
  text=$(comment lacks "$values")
  [[ -z $text ]] || ! grep --fixed-strings -- "$text" "$rendered" || fail "the rendering of $values has $text"
  comments "$values" | grep --quiet --line-regexp manifest || continue
  {
    comments "$values" | sed -E '/^(namespace|template|has|renders|lacks|fails): |^manifest$/d; s/^/# /'
    echo "# \`cargo xtask chart\` writes this file from $values."
    sed -E '/^\s*(# Source: |helm\.sh\/chart: |app\.kubernetes\.io\/managed-by: )/d' "$rendered"
  } >"$folder/plain"
  if [[ $mode == write ]]; then
    cp "$folder/plain" "deploy/manifests/$name"
  else
    cmp --quiet "$folder/plain" "deploy/manifests/$name" ||
      fail "deploy/manifests/$name is not what the chart says: \`cargo xtask chart\` writes it anew"
  fi
done
[[ $mode != render ]] || exit 0

for values in deploy/chart/ci/fail/*.yaml; do
  expected=$(comment fails "$values")
  [[ $expected ]] || fail "$values has no line \`# fails: TEXT\`"
  ! said=$(helm template "$values" adit 2>&1) || fail "$values renders, and should fail with: $expected"
  [[ $said == *"$expected"* ]] || fail "$values should fail with: $expected, but fails with: $said"
  failing=$((failing + 1))
done
echo "chart: $passing combinations pass, $failing fail as they should"
# `adit` reads the command lines of all renderings.
ADIT_MANIFESTS=$folder/rendered cargo test --quiet --package=adit-config --test=manifests
