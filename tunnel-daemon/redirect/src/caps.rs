//! Which eBPF features this host allows, or why not, each with a reason in words.
//!
//! Probes try things out where they can: version numbers do not show what a seccomp profile, a sysctl or a distribution has
//! disabled. Probes leave nothing behind.

use std::fs;
use std::io;

use aya::maps::{MapData, MapType};
use aya::programs::ProgramType;
use aya::sys::{is_map_supported, is_program_supported};
use rustix::thread::{CapabilitySet, capabilities as own_capabilities, set_capabilities};

use adit_host::capabilities::{effective, lacking};
use adit_host::cgroup::cgroup2_mount;
use adit_host::release::Release;

/// A feature that a host has or lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capability {
    /// Available, and how.
    Ready(String),
    /// Missing, why, and the remedy.
    Missing(String),
}

impl Capability {
    /// Whether the feature is available.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        matches!(self, Self::Ready(_))
    }

    /// How, or why not.
    #[must_use]
    pub fn reason(&self) -> &str {
        match self {
            Self::Ready(how) => how,
            Self::Missing(why) => why,
        }
    }
}

/// What this host allows.
#[derive(Clone, Debug)]
pub struct HostCaps {
    /// Capabilities for loading and attaching, and which of them are missing.
    pub capabilities: Capability,
    /// The same for accounting, whose program needs fewer.
    pub for_account: Capability,
    /// Whether bpf(2) loads a program of the needed kinds; after a trial, the redirect's own programs.
    pub bpf: Capability,
    /// The same; after a trial, accounting's own program.
    pub account_program: Capability,
    /// Type information of the running kernel. Not needed by the redirect.
    pub btf: Capability,
    /// Where cgroup2 is mounted.
    pub cgroup2: Capability,
    /// Ring buffers, which events come through. Not needed by the redirect.
    pub ring_buffer: Capability,
}

impl HostCaps {
    /// Probes the running kernel. Takes milliseconds; makes a few system calls and keeps nothing.
    #[must_use]
    pub fn probe() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let bpf = bpf();
        Self {
            capabilities: capabilities(&status, Release::running()),
            // The accounting program keeps no pointers of ours, for which older kernels require CAP_PERFMON.
            for_account: capabilities(&status, None),
            account_program: bpf.clone(),
            bpf,
            btf: btf(),
            cgroup2: match cgroup2_mount() {
                Ok(mount) => Capability::Ready(mount.display().to_string()),
                Err(why) => Capability::Missing(why),
            },
            ring_buffer: ring_buffer(),
        }
    }

    /// The results by their names in reports, without the two of accounting.
    #[must_use]
    pub fn rows(&self) -> [(&'static str, &Capability); 5] {
        [
            ("capabilities", &self.capabilities),
            ("bpf", &self.bpf),
            ("btf", &self.btf),
            ("cgroup2", &self.cgroup2),
            ("ring-buffer", &self.ring_buffer),
        ]
    }
}

fn capabilities(status: &str, release: Option<Release>) -> Capability {
    let Some(effective) = effective(status) else {
        return Capability::Missing(
            "/proc/self/status names no capabilities: mount /proc".to_owned(),
        );
    };
    let lacking = lacking(effective, release);
    if lacking.is_empty() {
        return Capability::Ready("enough to load and attach programs".to_owned());
    }
    let lacking = lacking.join(" and ");
    Capability::Missing(format!("{lacking} missing: run with it"))
}

fn bpf() -> Capability {
    for (kind, name) in [
        (ProgramType::CgroupSockAddr, "cgroup socket address"),
        (ProgramType::SockOps, "socket operations"),
    ] {
        match is_program_supported(kind) {
            Ok(true) => (),
            Ok(false) => {
                return Capability::Missing(format!(
                    "this kernel has no {name} programs: it was built without CONFIG_CGROUP_BPF"
                ));
            }
            Err(error) => {
                let cause = deepest(&error);
                return Capability::Missing(format!(
                    "bpf(2) refused ({cause}): it needs CAP_BPF, and a seccomp profile that allows it"
                ));
            }
        }
    }
    Capability::Ready("programs of these kinds load".to_owned())
}

fn btf() -> Capability {
    let path = "/sys/kernel/btf/vmlinux";
    match fs::metadata(path) {
        Ok(_) => Capability::Ready(path.to_owned()),
        Err(error) => Capability::Missing(format!(
            "{path}: {error}; the kernel was built without CONFIG_DEBUG_INFO_BTF, or /sys is not mounted"
        )),
    }
}

fn ring_buffer() -> Capability {
    match is_map_supported(MapType::RingBuf) {
        Ok(true) => Capability::Ready("supported".to_owned()),
        Ok(false) => Capability::Missing("the kernel is older than 5.8".to_owned()),
        Err(error) => Capability::Missing(format!("bpf(2) refused ({})", deepest(&error))),
    }
}

/// Whether this kernel refuses work on open maps to a process that has dropped CAP_BPF. Kernels before 5.19 do where the
/// sysctl `kernel.unprivileged_bpf_disabled` is set. False where bpf(2) is refused anyway.
#[must_use]
pub fn maps_need_capability() -> bool {
    // Capabilities belong to a thread, and this thread ends with them.
    let without = std::thread::spawn(|| {
        let mut sets = own_capabilities(None)?;
        sets.effective = CapabilitySet::empty();
        set_capabilities(None, sets)?;
        Ok::<bool, io::Error>(forbids_commands())
    });
    let without = without.join().is_ok_and(|answer| answer.unwrap_or(false));
    without && !forbids_commands()
}

/// Whether bpf(2) refuses before it examines its arguments.
fn forbids_commands() -> bool {
    let Ok(no_map) = fs::File::open("/dev/null") else {
        return false;
    };
    match MapData::from_fd(no_map.into()) {
        Ok(_cannot_be) => false,
        Err(error) => deepest_os_error(&error) == Some(libc::EPERM),
    }
}

fn deepest_os_error(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    let mut cause = Some(error);
    let mut code = None;
    while let Some(next) = cause {
        let io = next.downcast_ref::<io::Error>();
        code = io.and_then(io::Error::raw_os_error).or(code);
        cause = next.source();
    }
    code
}

/// The innermost cause: the kernel's error.
pub fn deepest(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_capability_is_named() {
        const NEW: Release = Release::new(6, 12, 0);
        const OLD: Release = Release::new(6, 1, 0);
        let bpf = CapabilitySet::BPF;
        let (net, sys) = (CapabilitySet::NET_ADMIN, CapabilitySet::SYS_ADMIN);
        for (set, release, lacks) in [
            (bpf | net, Some(NEW), &[] as &[&str]),
            (bpf | net, None, &[]),
            (bpf | net, Some(OLD), &["CAP_PERFMON"]),
            (bpf | net | CapabilitySet::PERFMON, Some(OLD), &[]),
            (sys | net, Some(OLD), &[]),
            (sys, Some(NEW), &["CAP_NET_ADMIN"]),
            (bpf, Some(NEW), &["CAP_NET_ADMIN"]),
            (
                CapabilitySet::empty(),
                Some(OLD),
                &["CAP_BPF", "CAP_PERFMON", "CAP_NET_ADMIN"],
            ),
        ] {
            assert_eq!(lacking(set, release), lacks, "{set:?} {release:?}");
            let status = format!("Name:\tx\nCapEff:\t{:016x}\n", set.bits());
            let said = capabilities(&status, release);
            assert_eq!(said.is_ready(), lacks.is_empty(), "{said:?}");
            assert!(said.reason().contains(&lacks.join(" and ")), "{said:?}");
        }
        assert!(!capabilities("", Some(NEW)).is_ready());
    }

    #[test]
    fn every_probe_row_has_a_reason() {
        for (name, capability) in HostCaps::probe().rows() {
            assert!(!capability.reason().is_empty(), "{name}");
        }
    }
}
