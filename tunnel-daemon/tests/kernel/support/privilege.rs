//! Whether this host permits what the tests need.

use adit_redirect::caps::HostCaps;
use adit_testkit::skip::has_v6;
pub(crate) use adit_testkit::skip::{skip as say, skip_unprivileged as skip};

/// Whether the host has the required privileges. Otherwise prints that the test is skipped. As root in CI it panics instead,
/// because nothing else would show that the test never runs.
///
/// # Panics
/// As root in CI.
pub(crate) fn ready(test: &str) -> bool {
    let caps = HostCaps::probe();
    let missing: Vec<String> = [
        ("capabilities", &caps.capabilities),
        ("bpf", &caps.bpf),
        ("cgroup2", &caps.cgroup2),
    ]
    .into_iter()
    .filter(|(_, capability)| !capability.is_ready())
    .map(|(name, capability)| format!("{name}: {}", capability.reason()))
    .collect();
    if missing.is_empty() {
        return true;
    }
    skip(test, missing.join("; "));
    false
}

/// As [`ready`], and whether this host has IPv6.
pub(crate) fn ready_v6(test: &str) -> bool {
    has_v6(test) && ready(test)
}
