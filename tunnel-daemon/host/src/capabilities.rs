//! Capabilities of this process, and the capabilities that loading eBPF programs requires.

use rustix::thread::CapabilitySet;

use crate::release::{Release, WITHOUT_PERFMON};

/// The effective capabilities of `/proc/PID/status`; `None`: the text names none.
pub fn effective(status: &str) -> Option<CapabilitySet> {
    set_of(status, "CapEff:")
}

/// The set of this name in `/proc/PID/status`.
pub(crate) fn set_of(status: &str, name: &str) -> Option<CapabilitySet> {
    let bits = status.lines().find_map(|line| line.strip_prefix(name))?;
    let bits = u64::from_str_radix(bits.trim(), 16).ok()?;
    Some(CapabilitySet::from_bits_retain(bits))
}

/// The effective capabilities of this process; none where /proc is not mounted.
pub fn of_this_process() -> CapabilitySet {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    effective(&status).unwrap_or(CapabilitySet::empty())
}

/// The capabilities that loading and attaching programs requires and `effective` lacks. `release`: the kernel, `None` for
/// the newest. CAP_SYS_ADMIN implies the others except CAP_NET_ADMIN, which marking sockets requires.
pub fn lacking(effective: CapabilitySet, release: Option<Release>) -> Vec<&'static str> {
    // The verifier of older kernels allows the pointers of our programs only with CAP_PERFMON.
    let perfmon = release.is_some_and(|release| release < WITHOUT_PERFMON);
    let covered = effective.contains(CapabilitySet::SYS_ADMIN);
    [
        (CapabilitySet::BPF, "CAP_BPF", !covered),
        (CapabilitySet::PERFMON, "CAP_PERFMON", perfmon && !covered),
        (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN", true),
    ]
    .into_iter()
    .filter(|(capability, _, needed)| *needed && !effective.contains(*capability))
    .map(|(_, name, _)| name)
    .collect()
}
