#!/usr/bin/env bash
# images.sh PROGRAM LICENCES TAR: packs the container images: one OCI layout with an image a tag, made without a daemon and the network.
# All share a layer with the binary and links to it, and differ in their entry points. `adit-shell` has a second layer with the shell of
# Debian's busybox-static, for platforms whose pods run one before they stop; there is a shell of the host's processor alone.
# `cargo xtask dist` gives VERSION, REVISION, ARCH, EPOCH, TIME, USER_ID, HOMEPAGE, REPOSITORY, and EMULATOR for another processor.
. "$(dirname "$0")/common.sh"
program=$1 licences=$2 tar=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
layout=$work/layout blobs=$work/layout/blobs/sha256 media=application/vnd.oci.image
mkdir -p "$blobs" "$work/base" "$work/shell"

put() {
  install -D --mode="$1" "$2" "$3"
}

# The same files give the same bytes, whoever owns them and whenever they were written.
pack() {
  (cd "$1" && ls -A | tar --create --format=gnu --sort=name --file "$2" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX \
    --mtime="@$EPOCH" --files-from -)
}

# Makes a file a blob, and sets its digest and its descriptor's fields behind `annotations` and before `platform`.
blob() {
  digest=sha256:$(sha256sum "$2" | cut -d' ' -f1)
  name="\"digest\":\"$digest\",\"mediaType\":\"$media.$1\""
  size="\"size\":$(stat --format=%s "$2")"
  mv "$2" "$blobs/${digest#sha256:}"
}

# Makes a layer of a folder, and sets its descriptor and the digest of its uncompressed form.
layer() {
  pack "$work/$1" "$work/$1.tar"
  diff="\"sha256:$(sha256sum "$work/$1.tar" | cut -d' ' -f1)\""
  gzip --no-name --best "$work/$1.tar"
  blob layer.v1.tar+gzip "$work/$1.tar.gz"
  layer="{$name,$size}"
}

# image TAG ENTRYPOINT LICENCE DIFFS LAYERS HISTORY: makes an image, and adds it to the index.
image() {
  local labels="\"org.opencontainers.image.created\":\"$TIME\",\"org.opencontainers.image.licenses\":\"$3\","
  labels+="\"org.opencontainers.image.revision\":\"$REVISION\",\"org.opencontainers.image.source\":\"$REPOSITORY\","
  labels+="\"org.opencontainers.image.title\":\"$1\",\"org.opencontainers.image.url\":\"$HOMEPAGE\","
  labels="{$labels\"org.opencontainers.image.version\":\"$VERSION\"}"
  local config="{\"Entrypoint\":[\"$2\"],\"Env\":[\"PATH=/usr/bin:/bin\"],\"Labels\":$labels,"
  config+="\"User\":\"$USER_ID:$USER_ID\",\"WorkingDir\":\"/\"}"
  printf '{"architecture":"%s","config":%s,"created":"%s","history":[%s],"os":"linux","rootfs":{"diff_ids":[%s],"type":"layers"}}' \
    "$ARCH" "$config" "$TIME" "$6" "$4" >"$work/blob"
  blob config.v1+json "$work/blob"
  printf '{"annotations":%s,"config":{%s},"layers":[%s],"mediaType":"%s.manifest.v1+json","schemaVersion":2}' \
    "$labels" "$name,$size" "$5" "$media" >"$work/blob"
  blob manifest.v1+json "$work/blob"
  manifests+="${manifests:+,}{\"annotations\":{\"org.opencontainers.image.ref.name\":\"$1\"},$name,"
  manifests+="\"platform\":{\"architecture\":\"$ARCH\",\"os\":\"linux\"},$size}"
}

put 755 "$program" "$work/base/usr/bin/adit"
put 644 "$licences" "$work/base/usr/share/doc/adit/LICENSES.txt"
mkdir "$work/base/bin"
# Relative links hold wherever the root is mounted.
for name in adit proxy-server proxy-agent; do
  ln --symbolic usr/bin/adit "$work/base/$name"
  ln --symbolic ../usr/bin/adit "$work/base/bin/$name"
  [[ $name == adit ]] || ln --symbolic ../../usr/bin/adit "$work/base/usr/bin/$name"
done
layer base
base=$layer base_diff=$diff history="{\"created\":\"$TIME\",\"created_by\":\"cargo xtask dist\"}" manifests=
for name in adit proxy-server proxy-agent; do
  image "$name" "/$name" Apache-2.0 "$base_diff" "$base" "$history"
done
if [[ -z ${EMULATOR:-} ]]; then
  put 755 /usr/bin/busybox "$work/shell/bin/busybox"
  copyright=usr/share/doc/busybox-static/copyright
  if [[ -f /$copyright ]]; then
    put 644 "/$copyright" "$work/shell/$copyright"
    # Which sources belong to it.
    dpkg-query --show --showformat='${Package} ${Version}\n' busybox-static >"$work/shell/usr/share/doc/busybox-static/version"
  fi
  for name in sh sleep; do ln --symbolic ../bin/busybox "$work/shell/bin/$name"; done
  layer shell
  image adit-shell /adit "Apache-2.0 AND GPL-2.0-only" "$base_diff,$diff" "$base,$layer" "$history,$history"
fi
printf '{"manifests":[%s],"mediaType":"%s.index.v1+json","schemaVersion":2}' "$manifests" "$media" >"$layout/index.json"
printf '{"imageLayoutVersion":"1.0.0"}' >"$layout/oci-layout"
pack "$layout" "$tar"
