//! Entries that run on every kernel: the rows of the table, as data.

/// A row.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    /// Name on the command line and on the console: short, without blanks.
    pub(super) name: &'static str,
    /// The row's text.
    pub(super) row: &'static str,
    /// The commands or tests to run.
    pub(super) run: Run,
    /// Time limit in the machine, seconds. Emulated machines are about fifteen times slower than this host.
    pub(super) limit_seconds: u64,
    /// When it runs.
    pub(super) when: When,
}

/// The work of an entry.
#[derive(Clone, Copy)]
pub(super) enum Run {
    /// A fact about the kernel: the last line of output is the cell, a failure means "no".
    Fact(&'static str),
    /// Commands that must succeed.
    Script(&'static str),
    /// Tests of a test binary: at least one must run, and all must pass. Without its source the entry is left out.
    Tests {
        /// Path of the binary's source, relative to the root.
        source: &'static str,
        /// Arguments of the test runner: filters and flags.
        args: &'static str,
    },
}

/// When an entry runs without `--only`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Always.
    Always,
    /// Only with `--wan`.
    Wan,
    /// Only if named with `--only`; the page has no row for it yet.
    Named,
}

/// A GiB on each pair takes minutes in an emulated machine, so the relay's rows leave those tests out.
const RELAY: &str = "tunnel-daemon/relay/tests/loopback/main.rs";
const LOOPBACK: &str = "tunnel-daemon/tests/loopback/main.rs";
const KERNEL: &str = "tunnel-daemon/tests/kernel/main.rs";

/// Modules loaded before the entries, with their dependencies.
pub(super) const MODULES: &[&str] = &[
    "tls",
    // Modules that `tls` requests by itself on hosts with modprobe.
    "ghash_generic",
    "ctr",
    "gcm",
    "aesni_intel",
    "veth",
    "sch_netem",
    "dummy",
    "bridge",
    "inet_diag",
    "tcp_diag",
    // Older kernels also request `crc32c_generic` by themselves. Rules of packet filters request the last four.
    "crc32c_generic",
    "nf_tables",
    "nft_chain_nat",
    "nft_nat",
    "nft_redir",
    "nft_tproxy",
];

/// The rows, in the order of the table.
pub(super) const ENTRIES: &[Entry] = &[
    fact(
        "btf",
        "types of the kernel (BTF)",
        "test -r /sys/kernel/btf/vmlinux && echo yes",
    ),
    fact(
        "cgroup2",
        "cgroup2",
        "grep -q ' cgroup2 ' /proc/mounts && echo yes",
    ),
    fact(
        "ktls",
        "kernel TLS (tls.ko loaded, TCP offers it)",
        "grep -qw tls /proc/sys/net/ipv4/tcp_available_ulp && echo yes",
    ),
    fact(
        "pipe-limits",
        "pipes: most bytes of one, pages of a user",
        "cd /proc/sys/fs && echo $(cat pipe-max-size), $(cat pipe-user-pages-soft)",
    ),
    fact(
        "ring-sysctl",
        "sysctl `kernel.io_uring_disabled`",
        "cat /proc/sys/kernel/io_uring_disabled",
    ),
    entry(
        "epoll-copy",
        "relay: epoll, copy",
        300,
        tests(RELAY, ":epoll_copy:: --skip a_gibibyte_is --test-threads=4"),
    ),
    entry(
        "epoll-splice",
        "relay: epoll, splice",
        300,
        tests(
            RELAY,
            ":epoll_splice:: --skip a_gibibyte_is --test-threads=4",
        ),
    ),
    entry(
        "ring-copy",
        "relay: io_uring (deferred task work), copy",
        300,
        tests(RELAY, ":ring_copy:: --skip a_gibibyte_is --test-threads=4"),
    ),
    entry(
        "ring-splice",
        "relay: io_uring, splice",
        300,
        tests(
            RELAY,
            ":ring_splice:: --skip a_gibibyte_is --test-threads=4",
        ),
    ),
    entry(
        "relay-ktls",
        "relay: kernel TLS, both drivers, copy and splice",
        300,
        tests(RELAY, "kernel_tls:: --skip a_gibibyte_is --test-threads=2"),
    ),
    entry(
        "ring-forbidden",
        "io_uring forbidden by seccomp: epoll, with the reason",
        60,
        tests(RELAY, "forbidden::"),
    ),
    entry(
        "demo",
        "`adit demo --once`",
        240,
        Run::Script("adit demo --once --plain"),
    ),
    entry(
        "demo-plaintext",
        "`adit demo --once --lane-security=plaintext`",
        240,
        Run::Script("adit demo --once --plain --lane-security=plaintext"),
    ),
    entry(
        "lanes",
        "tunnels on plaintext lanes, with and without frames",
        300,
        tests(LOOPBACK, "plaintext_lanes:: --test-threads=2"),
    ),
    entry(
        "ktls-lanes",
        "tunnels on kernel TLS",
        300,
        tests(LOOPBACK, "ktls_lanes:: --test-threads=2"),
    ),
    // Skips tests that other rows run, and tests that need a toolchain: the machine has none.
    entry(
        "ebpf",
        "eBPF: redirect and accounting; not the packet filter and seccomp",
        1200,
        tests(
            KERNEL,
            "--test-threads=2 --skip packet_filter:: --skip freshly_built --skip a_pod_without_a_listener_is_sent --skip kep2025:: \
             --skip redirect_spaces:: --skip proxy_header:: --skip least_privilege:: --skip clock:: \
             --skip node_address:: --skip node_interface:: --skip without_the_privilege_the_flag_and_the_remedy",
        ),
    ),
    entry(
        "pods",
        "eBPF: a control plane, a node and a pod in network namespaces (KEP-2025, redirect, node addresses, headers), missing privileges",
        600,
        tests(
            KERNEL,
            "--test-threads=1 kep2025:: redirect_spaces:: proxy_header:: a_pod_without_a_listener_is_sent \
             without_the_privilege_the_flag_and_the_remedy",
        ),
    ),
    Entry {
        when: When::Named,
        ..entry(
            "node-address",
            "an address of the node for its pods, by kube-proxy's rules, without eBPF",
            300,
            tests(KERNEL, "node_address:: node_interface:: --test-threads=1"),
        )
    },
    Entry {
        when: When::Named,
        ..entry(
            "packet-filter",
            "redirect by a packet filter's rules, without eBPF",
            300,
            tests(KERNEL, "packet_filter:: --test-threads=1"),
        )
    },
    Entry {
        when: When::Named,
        ..entry(
            "seccomp",
            "server and agent under their seccomp profiles, with eBPF",
            600,
            tests(KERNEL, "least_privilege:: --test-threads=1"),
        )
    },
    entry(
        "clock",
        "tunnels, links and dials while the clock jumps a day forward and back",
        360,
        tests(KERNEL, "clock:: --test-threads=1"),
    ),
    entry(
        "memory",
        "server and agent in memory cgroups of 64 and 256 MiB (version 2)",
        1200,
        // Those that an emulated machine ends within their own time limits.
        tests(
            LOOPBACK,
            "an_echo_beside_400_paused_readers paused_readers_in_256_mebibytes targets_that_all_send_on_raw_lanes \
             --test-threads=1 --nocapture",
        ),
    ),
    Entry {
        when: When::Wan,
        ..entry(
            "wan",
            "paths of 100 ms",
            900,
            Run::Script(include_str!("wan.sh")),
        )
    },
];

const fn entry(name: &'static str, row: &'static str, limit_seconds: u64, run: Run) -> Entry {
    Entry {
        name,
        row,
        run,
        limit_seconds,
        when: When::Always,
    }
}

const fn fact(name: &'static str, row: &'static str, commands: &'static str) -> Entry {
    entry(name, row, 10, Run::Fact(commands))
}

const fn tests(source: &'static str, args: &'static str) -> Run {
    Run::Tests { source, args }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_names_are_words_and_unique() {
        for (at, entry) in ENTRIES.iter().enumerate() {
            let is_word = |c: char| c.is_ascii_alphanumeric() || c == '-';
            assert!(entry.name.chars().all(is_word), "{}", entry.name);
            assert!(!entry.row.contains('|'), "{}", entry.row);
            // The page is compared by the rows' texts.
            let mut others = ENTRIES.iter().skip(at + 1);
            let is_same = |other: &Entry| other.name == entry.name || other.row == entry.row;
            assert!(!others.any(is_same), "{}", entry.name);
        }
    }
}
