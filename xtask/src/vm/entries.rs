//! What is asked of every kernel: the rows of the table, as data.

/// One row.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    /// Short and without blanks: the name on the command line and on the console.
    pub(super) name: &'static str,
    /// The row's text.
    pub(super) row: &'static str,
    /// What is run.
    pub(super) run: Run,
    /// Longest time in the machine, seconds. Emulated machines are about fifteen times slower than this one.
    pub(super) limit_seconds: u64,
    /// When it runs.
    pub(super) when: When,
}

/// What an entry runs.
#[derive(Clone, Copy)]
pub(super) enum Run {
    /// A fact about the kernel: the last line printed is the cell, a failure is the answer "no".
    Fact(&'static str),
    /// Commands that must succeed.
    Script(&'static str),
    /// Tests of a test binary, which must pass and be at least one. An entry whose source is not there is left out.
    Tests {
        /// Where the binary's source is, seen from the root.
        source: &'static str,
        /// Arguments of the test runner: filters and flags.
        args: &'static str,
    },
}

/// When an entry runs, unless it is named by `--only`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Always.
    Always,
    /// Only with `--wan`.
    Wan,
    /// Only where it is named; the page has no row of it yet.
    Named,
}

/// A GiB on each pair takes an emulated machine minutes: its rows leave that out.
const RELAY: &str = "tunnel-daemon/relay/tests/loopback/main.rs";
const LOOPBACK: &str = "tunnel-daemon/tests/loopback/main.rs";
const KERNEL: &str = "tunnel-daemon/tests/kernel/main.rs";

/// Modules that are loaded before; with those they depend on.
pub(super) const MODULES: &[&str] = &[
    "tls",
    // What it asks the kernel for by itself where modprobe is installed.
    "ghash_generic",
    "ctr",
    "gcm",
    "aesni_intel",
    "veth",
    "sch_netem",
    "dummy",
    "inet_diag",
    "tcp_diag",
    // Older kernels ask for the first by itself, too, to load the others. Rules of packet filters ask for the last three.
    "crc32c_generic",
    "nf_tables",
    "nft_chain_nat",
    "nft_redir",
    "nft_tproxy",
];

/// The rows, in the order of the table.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "btf",
        row: "types of the kernel (BTF)",
        run: Run::Fact("test -r /sys/kernel/btf/vmlinux && echo yes"),
        limit_seconds: 10,
        when: When::Always,
    },
    Entry {
        name: "cgroup2",
        row: "cgroup2",
        run: Run::Fact("grep -q ' cgroup2 ' /proc/mounts && echo yes"),
        limit_seconds: 10,
        when: When::Always,
    },
    Entry {
        name: "ktls",
        row: "kernel TLS (tls.ko loaded, TCP offers it)",
        run: Run::Fact("grep -qw tls /proc/sys/net/ipv4/tcp_available_ulp && echo yes"),
        limit_seconds: 10,
        when: When::Always,
    },
    Entry {
        name: "pipe-limits",
        row: "pipes: most bytes of one, pages of a user",
        run: Run::Fact("cd /proc/sys/fs && echo $(cat pipe-max-size), $(cat pipe-user-pages-soft)"),
        limit_seconds: 10,
        when: When::Always,
    },
    Entry {
        name: "ring-sysctl",
        row: "sysctl `kernel.io_uring_disabled`",
        run: Run::Fact("cat /proc/sys/kernel/io_uring_disabled"),
        limit_seconds: 10,
        when: When::Always,
    },
    Entry {
        name: "epoll-copy",
        row: "relay: epoll, copy",
        run: tests(RELAY, ":epoll_copy:: --skip a_gibibyte_is --test-threads=4"),
        limit_seconds: 300,
        when: When::Always,
    },
    Entry {
        name: "epoll-splice",
        row: "relay: epoll, splice",
        run: tests(
            RELAY,
            ":epoll_splice:: --skip a_gibibyte_is --test-threads=4",
        ),
        limit_seconds: 300,
        when: When::Always,
    },
    Entry {
        name: "ring-copy",
        row: "relay: io_uring (deferred task work), copy",
        run: tests(RELAY, ":ring_copy:: --skip a_gibibyte_is --test-threads=4"),
        limit_seconds: 300,
        when: When::Always,
    },
    Entry {
        name: "ring-splice",
        row: "relay: io_uring, splice",
        run: tests(
            RELAY,
            ":ring_splice:: --skip a_gibibyte_is --test-threads=4",
        ),
        limit_seconds: 300,
        when: When::Always,
    },
    Entry {
        name: "relay-ktls",
        row: "relay: kernel TLS, both drivers, copy and splice",
        run: tests(RELAY, "kernel_tls:: --skip a_gibibyte_is --test-threads=2"),
        limit_seconds: 300,
        when: When::Always,
    },
    Entry {
        name: "ring-forbidden",
        row: "io_uring forbidden by seccomp: epoll, with the reason",
        run: tests(RELAY, "forbidden::"),
        limit_seconds: 60,
        when: When::Always,
    },
    Entry {
        name: "demo",
        row: "`adit demo --once`",
        run: Run::Script("adit demo --once --plain"),
        limit_seconds: 240,
        when: When::Always,
    },
    Entry {
        name: "demo-plaintext",
        row: "`adit demo --once --lane-security=plaintext`",
        run: Run::Script("adit demo --once --plain --lane-security=plaintext"),
        limit_seconds: 240,
        when: When::Always,
    },
    Entry {
        name: "lanes",
        row: "tunnels on plaintext lanes, with and without frames",
        run: tests(LOOPBACK, "plaintext_lanes:: --test-threads=2"),
        limit_seconds: 300,
        when: When::Always,
    },
    Entry {
        name: "ktls-lanes",
        row: "tunnels on kernel TLS",
        run: tests(LOOPBACK, "ktls_lanes:: --test-threads=2"),
        limit_seconds: 300,
        when: When::Always,
    },
    Entry {
        name: "ebpf",
        row: "eBPF: redirect and accounting; not the packet filter and seccomp",
        // Nor what other rows run. There is no toolchain in the machine.
        run: tests(
            KERNEL,
            "--test-threads=2 --skip packet_filter:: --skip freshly_built --skip a_pod_without_a_listener_is_sent --skip kep2025:: \
             --skip redirect_spaces:: --skip proxy_header:: --skip least_privilege:: --skip clock:: \
             --skip without_the_privilege_the_flag_and_the_remedy",
        ),
        limit_seconds: 1200,
        when: When::Always,
    },
    Entry {
        name: "pods",
        row: "eBPF: a control plane, a node and a pod in network namespaces (KEP-2025, redirect, node addresses, headers), missing privileges",
        run: tests(
            KERNEL,
            "--test-threads=1 kep2025:: redirect_spaces:: proxy_header:: a_pod_without_a_listener_is_sent \
             without_the_privilege_the_flag_and_the_remedy",
        ),
        limit_seconds: 600,
        when: When::Always,
    },
    Entry {
        name: "packet-filter",
        row: "redirect by a packet filter's rules, without eBPF",
        run: tests(KERNEL, "packet_filter:: --test-threads=1"),
        limit_seconds: 300,
        when: When::Named,
    },
    Entry {
        name: "seccomp",
        row: "server and agent under their seccomp profiles, with eBPF",
        run: tests(KERNEL, "least_privilege:: --test-threads=1"),
        limit_seconds: 600,
        when: When::Named,
    },
    Entry {
        name: "clock",
        row: "tunnels, links and dials while the clock jumps a day forward and back",
        run: tests(KERNEL, "clock:: --test-threads=1"),
        limit_seconds: 360,
        when: When::Always,
    },
    Entry {
        name: "memory",
        row: "server and agent in memory cgroups of 64 and 256 MiB (version 2)",
        run: tests(
            LOOPBACK,
            "memory_limits --test-threads=1 --nocapture --skip paused_readers_kill_nobody",
        ),
        limit_seconds: 900,
        when: When::Always,
    },
    Entry {
        name: "wan",
        row: "paths of 100 ms",
        run: Run::Script(include_str!("wan.sh")),
        limit_seconds: 900,
        when: When::Wan,
    },
];

const fn tests(source: &'static str, args: &'static str) -> Run {
    Run::Tests { source, args }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_words_and_each_stands_once() {
        for (at, entry) in ENTRIES.iter().enumerate() {
            assert!(
                entry
                    .name
                    .chars()
                    .all(|c| c.is_ascii_alphanumeric() || c == '-')
            );
            let others = ENTRIES.iter().skip(at + 1);
            assert!(others.clone().all(|other| other.name != entry.name));
            // The page is compared by the rows' texts.
            assert!(others.clone().all(|other| other.row != entry.row));
            assert!(!entry.row.contains('|'), "{}", entry.row);
        }
    }
}
