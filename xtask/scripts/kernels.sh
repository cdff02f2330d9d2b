#!/usr/bin/env bash
# kernels.sh list | pick SERIES | get SERIES...: Debian's kernels for virtual machines, which have few drivers, but all that our tests need.
# apt finds, verifies and fetches packages with a configuration of its own; they are unpacked into target/vm, never installed. `list`
# prints the newest of each series, `pick` takes names of packages from $NAMES, and `get` prints the release of each series, such
# as 6.12; `newest` is the newest there is.
. "$(dirname "$0")/common.sh"
vm=$target/vm keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# Releases of such kernels in $names, oldest first. Packages without a full version only depend on others; `-rt` has another kernel.
releases() {
  sed -nE 's/^linux-image-([0-9][^.]*\.[^.]+\.[^.]+.*-cloud-amd64)$/\1/p' <<<"$names" | grep --invert-match -e -rt | sort --version-sort
}

# The newest release of a series, of all series as `newest`, or of `each` one.
pick() {
  local series=${1//./\\.}
  case $1 in
    each) releases | awk -F. '{newest[$1 "." $2] = $0} END {for (series in newest) print newest[series]}' | sort --version-sort ;;
    newest) releases | tail -n 1 ;;
    *) releases | grep "^$series\." | tail -n 1 || fail "no packaged kernel of the series $1; \`--list\` shows all" ;;
  esac
}

if [[ $1 == pick ]]; then
  names=$NAMES
  pick "$2"
  exit
fi
need apt-get apt-cache dpkg
[[ -f $keyring ]] || skip "$keyring is missing: install debian-archive-keyring"
mkdir -p "$vm"/{state/lists/partial,cache/archives/partial,empty}
: >"$vm/state/status"
for suite in debian:bookworm debian-security:bookworm-security debian:bookworm-backports debian:trixie-backports; do
  echo "deb [arch=amd64 signed-by=$keyring] http://deb.debian.org/${suite%:*} ${suite#*:} main"
done >"$vm/sources.list"
# apt would change to a sandbox user, which it does not need here.
cat >"$vm/apt.conf" <<END
Dir::State "$vm/state";
Dir::State::status "$vm/state/status";
Dir::Cache "$vm/cache";
Dir::Etc::sourcelist "$vm/sources.list";
Dir::Etc::sourceparts "$vm/empty";
Dir::Etc::preferencesparts "$vm/empty";
Dir::Etc::preferences "$vm/empty/none";
Acquire::Languages "none";
APT::Architecture "amd64";
APT::Architectures "amd64";
APT::Sandbox::User "";
END
export APT_CONFIG=$vm/apt.conf
apt-get -qq update >&2 || echo "vm: lists of packages are those of the last time" >&2
names=$(apt-cache pkgnames linux-)

if [[ $1 == list ]]; then
  pick each
  exit
fi
shift
for series; do
  release=$(pick "$series")
  if [[ ! -f $vm/$release/vmlinuz ]]; then
    echo "vm: fetching Linux $release" >&2
    rm -rf "$vm/fetch" "${vm:?}/$release"
    mkdir -p "$vm/fetch/unpacked"
    # Newer kernels are split into image, modules and configuration.
    parts=$(grep --line-regexp --fixed-strings "$(printf '%s\n' linux-{image,binary,modules,base}-"$release")" <<<"$names")
    (cd "$vm/fetch" && apt-get -qq download $parts >&2)
    for package in "$vm"/fetch/*.deb; do dpkg -x "$package" "$vm/fetch/unpacked"; done
    # With the release in its name below `boot`, or without it beside the modules, as in newer packages.
    for name in vmlinuz config; do
      file=$(find "$vm/fetch/unpacked" -type f -name "$name-$release" -print -quit)
      file=${file:-$(find "$vm/fetch/unpacked" -type f -name "$name" -print -quit)}
      [[ $file ]] || fail "the packages of $release hold no $name"
      cp "$file" "$vm/fetch/unpacked/$name"
    done
    # In one step, so that a partial kernel is never used.
    mv "$vm/fetch/unpacked" "$vm/$release"
    rm -rf "$vm/fetch"
  fi
  echo "$release"
done
