#!/usr/bin/env bash
# deb.sh PROGRAM LICENCES DEB: packs the Debian package: binary, units, configuration, manual pages and completions. It starts no service,
# as a service needs certificates first. `cargo xtask dist` gives VERSION, ARCH, EPOCH, HOMEPAGE, REPOSITORY, and EMULATOR for another
# processor.
. "$(dirname "$0")/common.sh"
program=$1 licences=$2 deb=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
package=$work/deb doc=usr/share/doc/adit

put() {
  install -D --mode="$1" "$2" "$package/$3"
}

completion() {
  mkdir -p "$(dirname "$package/$2")"
  ${EMULATOR:-} "$program" completion "$1" >"$package/$2"
}

put 755 "$program" usr/bin/adit
for unit in adit-server.service adit-server.socket adit-agent.service; do
  put 644 "deploy/systemd/$unit" "usr/lib/systemd/system/$unit"
done
for file in server.toml agent.toml; do put 640 "deploy/systemd/$file" "etc/adit/$file"; done
for file in adit-ebpf.conf adit-node-interface.conf; do put 644 "deploy/systemd/$file" "$doc/examples/$file"; done
completion bash usr/share/bash-completion/completions/adit
completion zsh usr/share/zsh/vendor-completions/_adit
completion fish usr/share/fish/vendor_completions.d/adit.fish
mkdir -p "$package/usr/share/man/man1"
${EMULATOR:-} "$program" man "$package/usr/share/man/man1" >/dev/null
put 644 "$licences" "$doc/LICENSES.txt"
put 644 CHANGELOG.md "$doc/changelog"
cat >"$package/$doc/copyright" <<END
Adit $VERSION

Source: $REPOSITORY
Copyright: the contributors of Adit
License: Apache-2.0, see /usr/share/common-licenses/Apache-2.0

The binary is static. LICENSES.txt.gz beside this file names what it holds, with all licences.
END
# Without name and time.
gzip --no-name --best "$package"/usr/share/man/man1/* "$package/$doc/LICENSES.txt" "$package/$doc/changelog"
# The rights after the installation, whatever the umask is. Keys and configuration are for root and the group.
chmod --recursive u=rwX,go=rX "$package"
chmod --recursive o= "$package/etc/adit"

mkdir "$package/DEBIAN"
cd "$package"
find usr -type f -print0 | sort --zero-terminated | xargs --null md5sum >DEBIAN/md5sums
cat >DEBIAN/control <<END
Package: adit
Version: $VERSION
Architecture: $ARCH
Maintainer: The contributors of Adit
Installed-Size: $(find usr etc -type f -printf '%s\n' | awk '{all += $1} END {print int((all + 1023) / 1024)}')
Depends: passwd
Section: net
Priority: optional
Homepage: $HOMEPAGE
Description: Konnectivity data plane: server and agent in one binary
 Tunnels from a Kubernetes control plane to its nodes, on the wire of Konnectivity.
 No service is started: make certificates first, see adit-pki(1).
END
printf '/etc/adit/%s\n' server.toml agent.toml >DEBIAN/conffiles
cat >DEBIAN/postinst <<'END'
#!/bin/sh
set -e
if [ "$1" = configure ]; then
  if ! getent passwd adit >/dev/null; then
    useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin --comment "Adit" adit
  fi
  for file in /etc/adit /etc/adit/server.toml /etc/adit/agent.toml; do
    if [ -e "$file" ] && [ "$(stat --format=%G "$file")" = root ]; then chgrp adit "$file"; fi
  done
  if [ -d /run/systemd/system ]; then systemctl daemon-reload; fi
fi
END
# An upgrade leaves services running: a restart is the operator's to time.
cat >DEBIAN/prerm <<'END'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
  systemctl disable --now adit-server.socket adit-server.service adit-agent.service || true
fi
END
cat >DEBIAN/postrm <<'END'
#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then systemctl daemon-reload || true; fi
if [ "$1" = purge ] && getent passwd adit >/dev/null; then userdel adit; fi
END
chmod 755 . DEBIAN DEBIAN/postinst DEBIAN/prerm DEBIAN/postrm
chmod 644 DEBIAN/control DEBIAN/conffiles DEBIAN/md5sums
SOURCE_DATE_EPOCH=$EPOCH dpkg-deb --root-owner-group --threads-max=1 -Zxz --build . "$deb" >/dev/null
