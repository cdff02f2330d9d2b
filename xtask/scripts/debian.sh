#!/usr/bin/env bash
# debian.sh FOLDER [PACKAGE...]: makes a small Debian with systemd in a fresh folder, in which packages and install pages are tried. It is
# fetched once and then copied; other packages cause a new fetch.
. "$(dirname "$0")/common.sh"
need debootstrap
to=$1 suite=bookworm
shift
# What a server has that a minimal installation lacks.
packages=systemd,systemd-sysv,dbus,curl,python3,procps
for package; do packages+=,$package; done
base=$target/debian-$suite-${packages//,/-}
if [[ ! -d $base ]]; then
  rm -rf "$base.partial"
  debootstrap --variant=minbase --include="$packages" "$suite" "$base.partial" http://deb.debian.org/debian >"$target/debootstrap.log" 2>&1 ||
    fail "debootstrap: $(tail -n 8 "$target/debootstrap.log")"
  mv "$base.partial" "$base"
fi
rm -rf "$to"
mkdir -p "$to"
cp --archive --reflink=auto --no-target-directory "$base" "$to"
