#!/usr/bin/env bash
# image-mounts.sh IMAGES EMULATOR COMMAND...: mounts the unpacked images below IMAGES as a container runtime does, and runs a command: each
# root is read-only, with volumes for certificates and sockets, /proc, and devices that a program without a terminal may need. A mount
# namespace of its own, which `cargo xtask dist --check` makes, holds all mounts and ends with the command. EMULATOR may be empty.
. "$(dirname "$0")/common.sh"
images=$1 emulator=$2
shift 2
# A short path, as the path of a socket has 107 bytes at most; nobody else sees it.
mount -t tmpfs -o mode=0755 tmpfs /mnt
install --directory --mode=700 --owner="$USER_ID" --group="$USER_ID" /mnt/volumes/etc/adit /mnt/volumes/run/adit
for image in "$images"/*/rootfs; do
  mkdir -p "$image"/{etc/adit,run/adit,proc,dev}
  mount --bind "$image" "$image"
  mount -o remount,bind,ro "$image"
  for volume in etc/adit run/adit; do mount --bind "/mnt/volumes/$volume" "$image/$volume"; done
  mount -t proc proc "$image/proc"
  mount -t tmpfs -o mode=0755 tmpfs "$image/dev"
  for device in null random urandom zero; do
    touch "$image/dev/$device"
    mount --bind "/dev/$device" "$image/dev/$device"
  done
  if [[ $emulator ]]; then
    # Beside devices, as nothing of the image is there.
    touch "$image/dev/emulator"
    mount --bind "$(command -v "$emulator")" "$image/dev/emulator"
  fi
  ! touch "$image/written" 2>/dev/null || fail "$image is not read-only"
done
"$@"
