#!/usr/bin/env bash
# deb-trial.sh DEB FOLDER: installs, looks at and purges the package in a small Debian in FOLDER, which is the host's also where the
# package is for another processor. `cargo xtask dist --check` gives VERSION, ARCH, and EMULATOR for another processor.
. "$(dirname "$0")/common.sh"
deb=$1 debian=$2
# CI has a network; a laptop on a train has none.
if ! bash xtask/scripts/debian.sh "$debian"; then
  [[ ${CI:-false} == false ]] || fail "no Debian to try it in"
  skip "no Debian to try it in"
fi
[[ $(dpkg-deb --field "$deb" Architecture) == "$ARCH" ]] || fail "the package for $ARCH names another processor"

inside() {
  env PATH=/usr/sbin:/usr/bin:/sbin:/bin chroot "$debian" "$@"
}

dpkg() {
  inside dpkg "$@" >"$debian.log" 2>&1 || fail "dpkg $*: $(tail -n 8 "$debian.log")"
}

# All files, but those of dpkg and backups of the list of users.
files() {
  (cd "$debian" && find . \( -path ./var/lib/dpkg -o -path ./var/log -o -path ./var/cache -o -path ./proc -o -path ./dev -o -path ./sys \
    -o -path ./run \) -prune -o ! -name '*-' -print | sort)
}

# Files after the installation, with mode and owners.
expect() {
  local found
  found=$(inside stat --format='%a %U:%G' "/$1") || fail "the installation lacks $1"
  [[ $found == "$2" ]] || fail "$1 has $found, not $2"
}

cp "$deb" "$debian/tmp/adit.deb"
emulator=
if [[ ${EMULATOR:-} ]]; then
  dpkg --add-architecture "$ARCH"
  cp "$(command -v "$EMULATOR")" "$debian/tmp/emulator"
  emulator=/tmp/emulator
fi
before=$(files)
dpkg --install /tmp/adit.deb
expect etc/adit '750 root:adit'
for file in server.toml agent.toml; do expect "etc/adit/$file" '640 root:adit'; done
expect usr/bin/adit '755 root:root'
for file in lib/systemd/system/adit-{server.service,server.socket,agent.service} share/man/man1/adit{,-server}.1.gz \
  share/{bash-completion/completions/adit,zsh/vendor-completions/_adit,fish/vendor_completions.d/adit.fish,doc/adit/copyright}; do
  expect "usr/$file" '644 root:root'
done
[[ $(inside $emulator /usr/bin/adit --version) == *"$VERSION"* ]] || fail "the installed adit has another version"
[[ $(inside getent passwd adit) == */nologin* ]] || fail "the user adit can log in"
verified=$(inside dpkg --verify adit) || fail "dpkg --verify: $verified"
[[ -z $verified ]] || fail "dpkg finds changes: $verified"
enabled=$(find "$debian/etc/systemd" -name 'adit*')
[[ -z $enabled ]] || fail "enabled: $enabled"
dpkg --remove adit
[[ -f $debian/etc/adit/server.toml ]] || fail "the configuration went with the removal, before the purge"
dpkg --purge adit
after=$(files)
left=$(comm -13 <(echo "$before") <(echo "$after"))
[[ -z $left ]] || fail "the purge leaves $left"
! grep adit "$debian/etc/passwd" "$debian/etc/group" || fail "the purge leaves the user or the group"
rm -rf "$debian"
