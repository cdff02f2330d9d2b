//! The host: its kernel, how that kernel was built, and what this process may use of it.

use std::fs;
use std::path::Path;

use adit_relay::{Choice, Preference, ProbeError};
use rustix::process::{Resource, getrlimit};
use rustix::thread::CapabilitySet;

use super::Needs;
use super::line::{degraded, missing, ok};
use crate::budgets::{socket_buffer_kib_max, tunnels_max};
use crate::status::model::Capability;
use adit_host::capabilities;
use adit_host::cgroup::cgroup2_mount;
use adit_host::memory::{self, MemoryLimit};
use adit_host::release::Release;

/// The minimum kernel for io_uring relays, and the oldest kernel measured.
const FLOOR: Release = Release::new(6, 1, 0);
/// From this release on the kernel moves more than one page at once from a pipe to a socket.
const SPLICE_BATCHED: Release = Release::new(6, 5, 0);
/// Fewer descriptors are too few for a cluster: each tunnel takes two.
const DESCRIPTORS: u64 = 65_536;
/// With less memory, in bytes, the budgets are reduced.
const MEMORY: u64 = 128 << 20;
/// Size of a splice pipe; also the least that all of a user's pipes together should hold.
const PIPE_BYTES: u64 = 1 << 20;

/// Facts about the host; `None` for facts that cannot be read.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    release: Option<Release>,
    /// The kernel offers BTF, a description of its types.
    btf: bool,
    /// Mount point of cgroup2.
    cgroup2: Option<String>,
    /// Effective capabilities.
    capabilities: Option<CapabilitySet>,
    /// Seccomp mode: 0 none, 1 strict, 2 filter.
    seccomp: Option<u64>,
    /// Whether an io_uring ring could be created; else the reason and the remedy.
    ring: Result<(), (String, String)>,
    pipe_bytes_max: Option<u64>,
    /// Limit of the pages in all pipes of a user; 0 is unlimited.
    pipe_pages_soft: Option<u64>,
    /// Whether a connection could be given to kernel TLS; else the error.
    kernel_tls: Result<(), String>,
    /// Hard limit of open files.
    descriptors: Option<u64>,
    memory: MemoryLimit,
}

impl Facts {
    /// Facts of this host. `connects`: also whether kernel TLS works, which takes a connection on loopback.
    pub(super) fn gather(connects: bool) -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        Self {
            release: fs::read_to_string("/proc/sys/kernel/osrelease")
                .ok()
                .and_then(|text| Release::parse(text.trim())),
            btf: Path::new("/sys/kernel/btf/vmlinux").exists(),
            cgroup2: cgroup2_mount()
                .ok()
                .map(|mount| mount.display().to_string()),
            capabilities: capabilities::effective(&status),
            seccomp: seccomp_mode(&status),
            ring: adit_relay::probe(Preference::IoUring)
                .map(|_choice| ())
                .map_err(|error| (error.reason, error.remedy.to_owned())),
            pipe_bytes_max: number("/proc/sys/fs/pipe-max-size"),
            pipe_pages_soft: number("/proc/sys/fs/pipe-user-pages-soft"),
            kernel_tls: match connects {
                true => adit_relay::probe_kernel_tls().map_err(|error| error.to_string()),
                false => Err("not tried".to_owned()),
            },
            descriptors: getrlimit(Resource::Nofile).maximum,
            memory: memory::found(),
        }
    }
}

fn number(path: &str) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn seccomp_mode(status: &str) -> Option<u64> {
    let mode = status
        .lines()
        .find_map(|line| line.strip_prefix("Seccomp:"))?;
    mode.trim().parse().ok()
}

/// Name of the line, whether the feature is needed (else the line is no judgement), and the check.
type Check = (&'static str, fn(Needs) -> bool, fn(&Facts) -> Capability);

/// All checks, in a fixed order.
const CHECKS: [Check; 10] = [
    ("kernel", |needs| needs.ebpf || needs.io_uring, kernel),
    // This project's eBPF programs do without BTF.
    ("btf", |_| false, btf),
    ("cgroup2", |needs| needs.ebpf, cgroup2),
    ("capabilities", |needs| needs.ebpf, capabilities),
    ("seccomp", |_| true, seccomp),
    ("io_uring", |needs| needs.io_uring, ring),
    ("splice", |needs| needs.relay, splice),
    ("kernel-tls", |needs| needs.kernel_tls, kernel_tls),
    ("descriptors", |_| true, descriptors),
    ("memory", |_| true, memory_line),
];

/// The lines of all checks.
pub(super) fn lines(facts: &Facts, needs: Needs) -> Vec<Capability> {
    let checks = CHECKS.into_iter();
    checks
        .map(|(name, needed, check)| check(facts).named(name).judged(needed(needs)))
        .collect()
}

fn kernel(facts: &Facts) -> Capability {
    match facts.release {
        None => degraded(
            "the release of the kernel is not known: /proc/sys/kernel/osrelease says nothing",
            "mount /proc",
        ),
        Some(release) if release < FLOOR => degraded(
            format!("{release}: tunnels work; io_uring and eBPF are not tested below {FLOOR}"),
            format!("use a kernel from {FLOOR} on"),
        ),
        Some(release) => ok(release.to_string()),
    }
}

fn btf(facts: &Facts) -> Capability {
    ok(match facts.btf {
        true => "the kernel describes its types",
        false => {
            "no /sys/kernel/btf/vmlinux: Adit's eBPF programs do not need it, but tracing tools do"
        }
    })
}

fn cgroup2(facts: &Facts) -> Capability {
    match &facts.cgroup2 {
        Some(path) => ok(format!("mounted at {path}")),
        None => degraded(
            "not mounted: no memory limit is seen, and eBPF has nothing to attach to",
            "mount it: mount -t cgroup2 none /sys/fs/cgroup",
        ),
    }
}

fn capabilities(facts: &Facts) -> Capability {
    let Some(effective) = facts.capabilities else {
        return degraded("not known: /proc/self/status says nothing", "mount /proc");
    };
    let lacking = capabilities::lacking(effective, facts.release);
    if lacking.is_empty() {
        return ok("what eBPF takes, or more");
    }
    let lacking = lacking.join(" and ");
    degraded(
        format!("without {lacking}: no eBPF; tunnels need no capability"),
        format!("add {lacking} only if you use eBPF"),
    )
}

fn seccomp(facts: &Facts) -> Capability {
    match facts.seccomp {
        Some(0) => ok("no profile is in force"),
        Some(2) => ok("a profile is in force; what it forbids shows in the other lines"),
        Some(_) => missing(
            "strict mode is in force: nothing can run under it",
            "start it under a filter, or without a profile",
        ),
        None => degraded(
            "not known: the kernel has none, or /proc is not mounted",
            "mount /proc",
        ),
    }
}

fn ring(facts: &Facts) -> Capability {
    match &facts.ring {
        Ok(()) => ok("a ring can be made: --relay-engine=io-uring works"),
        Err((reason, remedy)) => degraded(
            format!("{reason}: the relay uses epoll, which is as fast"),
            remedy.clone(),
        ),
    }
}

/// The engine requested by name: where it is impossible, a server or agent does not start. `None`: no engine is requested.
pub(super) fn relay_engine(wanted: Preference) -> Option<Capability> {
    (wanted != Preference::Auto).then(|| relay_engine_of(adit_relay::probe(wanted)))
}

fn relay_engine_of(found: Result<Choice, ProbeError>) -> Capability {
    let line = match found {
        Ok(choice) => ok(format!("{} can be had", choice.engine.name())),
        Err(error) => missing(
            format!("it would not start with --relay-engine: {}", error.reason),
            format!("{}, or give --relay-engine=auto", error.remedy),
        ),
    };
    line.named("relay-engine")
}

fn splice(facts: &Facts) -> Capability {
    let batched = facts.release.is_some_and(|it| it >= SPLICE_BATCHED);
    match (facts.pipe_bytes_max, facts.pipe_pages_soft) {
        (Some(bytes), _) if bytes < PIPE_BYTES => degraded(
            format!("a pipe holds at most {bytes} bytes: bulk on lanes in clear text is slower"),
            format!("sysctl fs.pipe-max-size={PIPE_BYTES}"),
        ),
        (Some(_), Some(pages)) if pages != 0 && pages <= 16_384 && !privileged(facts) => degraded(
            format!(
                "the pipes of this user hold {pages} pages together: some sixty splice at once in full size, \
                 further ones with small pipes or by copying"
            ),
            "sysctl fs.pipe-user-pages-soft=0, or a larger number",
        ),
        (Some(bytes), Some(_)) if batched => ok(format!("pipes of up to {bytes} bytes")),
        (Some(_), Some(_)) => degraded(
            format!("works; below {SPLICE_BATCHED} the kernel moves one page at a time"),
            format!("use a kernel from {SPLICE_BATCHED} on for more"),
        ),
        _ => degraded(
            "the limits of pipes are not known: /proc/sys/fs says nothing",
            "mount /proc",
        ),
    }
}

/// Whether this process is exempt from the pipe limits of a user.
fn privileged(facts: &Facts) -> bool {
    facts
        .capabilities
        .is_some_and(|set| set.intersects(CapabilitySet::SYS_RESOURCE | CapabilitySet::SYS_ADMIN))
}

fn kernel_tls(facts: &Facts) -> Capability {
    match &facts.kernel_tls {
        Ok(()) => ok("available"),
        Err(error) => degraded(
            format!("not available ({error}): lanes use user-space TLS, which is the default"),
            "modprobe tls, if your kernel has that module",
        ),
    }
}

fn descriptors(facts: &Facts) -> Capability {
    // A start raises the soft limit to the hard limit.
    match facts.descriptors {
        None => ok("any number of open files"),
        Some(hard) if hard >= DESCRIPTORS => ok(format!("up to {hard} open files")),
        Some(hard) => degraded(
            format!(
                "up to {hard} open files: enough for about {} tunnels",
                hard.saturating_sub(512) / 3
            ),
            format!("raise the hard limit (LimitNOFILE=, ulimit -Hn) to {DESCRIPTORS} or more"),
        ),
    }
}

fn memory_line(facts: &Facts) -> Capability {
    let MemoryLimit { bytes, file } = &facts.memory;
    let size = format!("{} MiB", bytes >> 20);
    let Some(file) = file else {
        return degraded(
            format!("{size} are assumed: no limit and no size of this machine can be read"),
            "mount /proc and the cgroup file systems",
        );
    };
    let buffers = socket_buffer_kib_max(*bytes)
        .map(|kib| format!("; sockets of tunnels have at most {kib} KiB each way"))
        .unwrap_or_default();
    let [sockets, grpc] = tunnels_max(*bytes);
    let text = format!(
        "{size}, says {}; holds {sockets} tunnels, or {grpc} of gRPC clients{buffers}",
        file.display()
    );
    if *bytes >= MEMORY {
        return ok(text);
    }
    degraded(
        format!(
            "{text}: low; a few stalled readers fill the buffers, and the largest stalled tunnels are then ended"
        ),
        "raise the limit of the cgroup (MemoryMax=, resources.limits.memory) to 128 MiB or more",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::model::Verdict;

    const ALL: Needs = Needs {
        ebpf: true,
        relay: true,
        io_uring: true,
        kernel_tls: true,
    };

    fn best() -> Facts {
        Facts {
            release: Release::parse("6.12.104-1-amd64"),
            btf: true,
            cgroup2: Some("/sys/fs/cgroup".to_owned()),
            capabilities: Some(CapabilitySet::all()),
            seccomp: Some(0),
            ring: Ok(()),
            pipe_bytes_max: Some(1 << 20),
            pipe_pages_soft: Some(16_384),
            kernel_tls: Ok(()),
            descriptors: Some(1 << 20),
            memory: MemoryLimit {
                bytes: 1 << 30,
                file: Some("/proc/meminfo".into()),
            },
        }
    }

    fn verdict(facts: &Facts, name: &str) -> Verdict {
        let lines = lines(facts, ALL);
        let line = lines.iter().find(|line| line.name == name);
        let line = line.unwrap_or_else(|| panic!("no line {name}"));
        assert_eq!(
            line.verdict <= Verdict::Ok,
            line.remedy.is_none(),
            "{line:?}"
        );
        line.verdict
    }

    #[test]
    fn all_lines_are_ok_on_a_complete_host() {
        for line in lines(&best(), ALL) {
            let expected = if line.name == "btf" {
                Verdict::Info
            } else {
                Verdict::Ok
            };
            assert_eq!(line.verdict, expected, "{line:?}");
        }
    }

    /// As on an ordinary host, or in a container without privileges.
    #[test]
    fn unused_features_are_reported_as_info() {
        let mut facts = best();
        facts.capabilities = Some(CapabilitySet::empty());
        facts.ring = Err(("forbidden".into(), "allow it".into()));
        facts.kernel_tls = Err("ENOENT".into());
        (facts.btf, facts.cgroup2) = (false, None);
        facts.release = Release::parse("5.15.0");
        for line in lines(&facts, Needs::default()) {
            let is_judged = ["seccomp", "descriptors", "memory"].contains(&line.name.as_str());
            let expected = if is_judged {
                Verdict::Ok
            } else {
                Verdict::Info
            };
            assert_eq!(line.verdict, expected, "{line:?}");
            assert_eq!(line.remedy, None, "{line:?}");
        }
    }

    #[test]
    fn each_missing_feature_changes_the_verdict_of_its_line() {
        type Change = fn(&mut Facts);
        let changes: [(&str, Verdict, Change); 18] = [
            ("kernel", Verdict::Degraded, |f| {
                f.release = Release::parse("5.15.0")
            }),
            ("kernel", Verdict::Degraded, |f| f.release = None),
            ("cgroup2", Verdict::Degraded, |f| f.cgroup2 = None),
            ("capabilities", Verdict::Degraded, |f| {
                f.capabilities = Some(CapabilitySet::empty())
            }),
            ("capabilities", Verdict::Degraded, |f| {
                f.capabilities = Some(CapabilitySet::BPF)
            }),
            ("capabilities", Verdict::Degraded, |f| f.capabilities = None),
            // Without CAP_PERFMON.
            ("capabilities", Verdict::Degraded, |f| {
                f.release = Release::parse("6.1.0");
                f.capabilities = Some(CapabilitySet::BPF | CapabilitySet::NET_ADMIN);
            }),
            ("seccomp", Verdict::Missing, |f| f.seccomp = Some(1)),
            ("seccomp", Verdict::Degraded, |f| f.seccomp = None),
            ("io_uring", Verdict::Degraded, |f| {
                f.ring = Err(("no".into(), "yes".into()))
            }),
            ("splice", Verdict::Degraded, |f| {
                f.pipe_bytes_max = Some(65_536)
            }),
            ("splice", Verdict::Degraded, |f| {
                f.capabilities = Some(CapabilitySet::empty())
            }),
            ("splice", Verdict::Degraded, |f| {
                f.release = Release::parse("6.1.0")
            }),
            ("splice", Verdict::Degraded, |f| f.pipe_bytes_max = None),
            ("kernel-tls", Verdict::Degraded, |f| {
                f.kernel_tls = Err("ENOENT".into())
            }),
            ("descriptors", Verdict::Degraded, |f| {
                f.descriptors = Some(1024)
            }),
            ("memory", Verdict::Degraded, |f| f.memory.bytes = 64 << 20),
            ("memory", Verdict::Degraded, |f| f.memory.file = None),
        ];
        for (number, (name, expected, change)) in changes.into_iter().enumerate() {
            let mut facts = best();
            change(&mut facts);
            assert_eq!(verdict(&facts, name), expected, "change {number}: {name}");
        }
    }

    #[test]
    fn the_socket_buffer_bound_is_shown_where_memory_is_small() {
        let mut facts = best();
        for (memory, expected) in [
            (64 << 20, Some("at most 128 KiB each way")),
            (512 << 20, None),
        ] {
            facts.memory.bytes = memory;
            let text = memory_line(&facts).text;
            let bound = text
                .split_once("sockets of tunnels have ")
                .map(|(_, bound)| bound);
            let bound = bound.and_then(|bound| bound.split(':').next());
            assert_eq!(bound, expected, "{text}");
        }
    }

    #[test]
    fn an_explicitly_selected_engine_must_be_available() {
        assert_eq!(relay_engine(Preference::Auto), None);
        let epoll = relay_engine(Preference::Epoll).unwrap();
        assert_eq!(epoll.verdict, Verdict::Ok, "{epoll:?}");
        let forbidden = relay_engine_of(Err(ProbeError {
            basis: adit_relay::Basis::Forbidden,
            reason: "forbidden here".to_owned(),
            remedy: "allow it",
        }));
        assert_eq!(forbidden.verdict, Verdict::Missing, "{forbidden:?}");
        assert!(forbidden.text.contains("forbidden here"), "{forbidden:?}");
    }

    #[test]
    fn optional_features_may_be_missing() {
        let mut facts = best();
        (facts.seccomp, facts.pipe_pages_soft) = (Some(2), Some(0));
        facts.capabilities = Some(CapabilitySet::BPF | CapabilitySet::NET_ADMIN);
        facts.descriptors = None;
        for name in ["seccomp", "splice", "capabilities", "descriptors"] {
            assert_eq!(verdict(&facts, name), Verdict::Ok, "{name}");
        }
    }

    #[test]
    fn every_check_works_on_this_host() {
        let lines = lines(&Facts::gather(true), ALL);
        assert_eq!(lines.len(), 10);
        // Every test host has a /proc.
        assert!(
            lines.iter().all(|line| !line.text.contains("mount /proc")),
            "{lines:?}"
        );
    }
}
