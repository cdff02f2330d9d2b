#!/bin/busybox sh
# First process of the virtual machine: mounts file systems, loads modules, runs every entry with its time limit and prints
# the result on the console. `cargo xtask vm` reads the lines with two @.
/bin/busybox mkdir -p /proc /sys /dev /tmp /run /root /var/tmp
/bin/busybox --install -s /bin
export PATH=/host:/bin:/sbin HOME=/root
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm /dev/pts
mount -t devpts pts /dev/pts
mount -t tmpfs shm /dev/shm
# No file system of its own: a checkout below /tmp has its program there, which tests start.
chmod 1777 /tmp
mount -t tmpfs run /run
mkdir -p /run/netns /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t tracefs trace /sys/kernel/tracing 2>/dev/null
/host/ip link set lo up
ulimit -n 65536
echo "@@hello $(uname -r) $(uname -v)"
for module in /modules/*.ko; do
  [ -f "$module" ] || continue
  insmod "$module" 2>/tmp/insmod || echo "@@module $(basename "$module") $(cat /tmp/insmod)"
done
# With CI set, tests fail instead of being skipped. Tests may set the clock: no other program uses it.
export CI=true RUST_BACKTRACE=1 ADIT_NEEDS_KTLS=true ADIT_OWN_CLOCK=true
cd /tmp
for entry in /entries/*; do
  name=$(basename "$entry")
  echo "@@begin $name"
  # The machine runs at night, so these tests run in their long form.
  case "$name" in *-memory) export ADIT_NIGHTLY=1 ;; *) unset ADIT_NIGHTLY ;; esac
  begin=$(cut -d' ' -f1 /proc/uptime)
  timeout -k 5 "$(cat "/limits/$name")" /host/sh "$entry" >/tmp/.out 2>&1 </dev/null
  status=$?
  # Of what comes before, the lines that the table is made of, and why a test failed.
  { head -n -60 /tmp/.out | grep -E -A1 'SKIPPED |MEASURED |panicked at'; tail -n 60 /tmp/.out; } | cut -c1-400 | sed 's/^/| /'
  [ "$status" = 0 ] || dmesg | grep -i 'out of memory' | tail -n 5 | sed 's/^/| /'
  echo "@@end $name $status $begin $(cut -d' ' -f1 /proc/uptime)"
done
echo "@@bye"
poweroff -f
