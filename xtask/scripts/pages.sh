#!/usr/bin/env bash
# Runs the commands of install pages as they stand there, each page in a blank Debian of its own, after `cargo xtask dist`.
. "$(dirname "$0")/common.sh"
need debootstrap systemd-nspawn
deb=$(find "$target/dist" -name '*-amd64.deb' 2>/dev/null || true)
[[ $deb && $(uname -m) == x86_64 ]] || skip "target/dist has no package of this processor: run cargo xtask dist first"

# The registry that pages name, and its host.
registry=$(sed -n 's/^registry = "\(.*\)"$/\1/p' Cargo.toml)
names="registry=$registry host=${registry%%/*}"
# A registry that `skopeo` trusts.
read -r -d '' serve <<'END' || true
echo "127.0.0.1 $host" >>/etc/hosts
trusted=/etc/containers/certs.d/$host
mkdir --parents $trusted
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=registry \
  -addext subjectAltName=DNS:$host -keyout /srv/registry.key -out $trusted/ca.crt
cat >/srv/registry.yml <<YAML
version: 0.1
storage: {filesystem: {rootdirectory: /srv/registry}}
http: {addr: '127.0.0.1:443', tls: {certificate: $trusted/ca.crt, key: /srv/registry.key}}
YAML
docker-registry serve /srv/registry.yml &
curl --silent --show-error --retry 60 --retry-delay 1 --retry-connrefused --cacert $trusted/ca.crt https://$host/v2/
END
# The image is in the registry and runs. The package is installed, and its services are off.
read -r -d '' pulled <<'END' || true
skopeo copy docker://$registry/proxy-agent:v0.1.0 oci:/srv/pulled:agent
umoci unpack --image /srv/pulled:agent /srv/bundle
grep --quiet '"/proxy-agent"' /srv/bundle/config.json
chroot --userspec=65532:65532 /srv/bundle/rootfs /adit version
adit version
for unit in adit-server adit-agent; do test "$(systemctl is-enabled $unit)" = disabled; done
END
# The units are sound, and exposed by less than 2.5 of 10.
read -r -d '' units <<'END' || true
cd /lib/systemd/system
systemd-analyze verify --man=no adit-server.service adit-agent.service adit-server.socket
for unit in adit-server adit-agent; do systemd-analyze security --offline=true --threshold=25 $unit.service; done
cd /srv/page
END

# Writes the blocks of a page into a folder: `sh` runs to its end, `sh background` in a terminal of its own as long as the page lasts.
# `sh elsewhere` is for other machines.
blocks() {
  awk -v folder="$2" '
    /^```/ {
      if (file) print "pwd >/srv/page/cwd" >file
      file = ""
      if (!open && $1 == "```sh" && (NF == 1 || $2 == "background")) {
        file = sprintf("%s/%02d%s.sh", folder, number++, $2)
        print "set -x\ncd \"$(cat /srv/page/cwd)\"" >file
      }
      open = !open
      next
    }
    file { print >file }' "$1"
}

# page FILE START BEFORE AFTER [PACKAGE...]: START is what a reader has when he begins: the `program` on the path, the `package` in the
# folder where the commands start, or the `release`: all artefacts, their signature and the public key. BEFORE and AFTER are commands
# around those of the page: what its reader has beside this machine, and what is to come of it.
page() {
  local file=$1 start=$2 before=$3 after=$4 machine folder block run serves= rc=0
  machine=$target/pages/$(basename "$file" .md) folder=$machine/srv/page
  shift 4
  bash xtask/scripts/debian.sh "$machine" "$@"
  mkdir -p "$folder"
  if [[ $start == release ]]; then
    cp "$target"/dist/* "$folder"
    bash xtask/scripts/sums.sh "$folder" list
    PUBLIC=$folder/adit-release.pub bash xtask/scripts/sums.sh "$folder" sign
  else
    cp "$deb" "$folder"
  fi
  blocks "$file" "$folder"
  {
    printf 'cd /srv/page\npwd >cwd\n'
    [[ $start != program ]] || printf 'dpkg --install ./%s\n%s\n' "$(basename "$deb")" "$units"
    echo "$before"
    for block in "$folder"/[0-9]*.sh; do
      [[ -f $block ]] || fail "$file has no commands"
      run="bash -euo pipefail /srv/page/$(basename "$block")"
      echo "echo '--- $(basename "$block")'"
      if [[ $block == *background.sh ]]; then
        serves=yes
        echo "$run &"
      elif [[ $serves ]]; then
        # What runs in the background takes a moment to listen.
        echo "for try in \$(seq 40); do $run && break; test \$try != 40; sleep 0.5; done"
      else
        echo "$run"
      fi
    done
    printf '%s\necho 0 >/srv/page/rc\n' "$after"
  } >"$folder/run.sh"
  cat >"$machine/etc/systemd/system/page.service" <<'END'
[Unit]
After=network.target dbus.service
[Service]
Type=oneshot
Environment=HOME=/srv/page DEBIAN_FRONTEND=noninteractive
ExecStart=/bin/bash -c 'exec bash -euo pipefail /srv/page/run.sh >/srv/page/log 2>&1'
ExecStopPost=/bin/systemctl poweroff --force --no-block
[Install]
WantedBy=multi-user.target
END
  mkdir -p "$machine/etc/systemd/system/multi-user.target.wants"
  ln --symbolic ../page.service "$machine/etc/systemd/system/multi-user.target.wants"
  echo "pages: $file, $(ls "$folder"/[0-9]*.sh | wc -l) blocks"
  timeout 5m systemd-nspawn --quiet --boot --register=no --keep-unit --console=pipe --private-network --directory "$machine" </dev/null || rc=$?
  [[ $(cat "$folder/rc" 2>/dev/null) == 0 ]] || fail "$file: a command fails, or the machine (status $rc): $(tail -n 30 "$folder/log")"
  rm -rf "$machine"
}

page docs/getting-started.md program '' ''
page docs/install/systemd.md package '' ''
page docs/install/static-pod.md program '' ''
# For skopeo netavark: debootstrap does not resolve what several packages provide.
page docs/install/images.md release "$names"$'\n'"$serve" "$pulled" ca-certificates docker-registry netavark openssl skopeo umoci
