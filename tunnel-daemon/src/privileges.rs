//! What the process may do beyond what its user may, and how it gives that up.
//!
//! The kernel keeps capabilities by thread. A thread gives them up as it begins; the one that starts server or agent keeps them
//! until it has: it attaches programs, marks sockets and listens on low ports. What it starts before that begins in the same way.
//! Nobody can take anything back: permitted and bounding set go, too, and a program that was started could gain none.

use std::fs;
use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs,
};

use crate::wait::wait_until;

/// How long threads that were just made may take to begin.
const BEGIN_MAX: Duration = Duration::from_secs(5);
/// What a process may keep that has it: ports below 1024, and what the limits of its user's memory, pipes and files mean. Files
/// of others are read again when they change; a process of root could do worse with its own.
const KEPT: CapabilitySet = CapabilitySet::NET_BIND_SERVICE
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_RESOURCE);

/// What threads keep; nothing is given up while there is no such set.
static KEEP: OnceLock<CapabilitySet> = OnceLock::new();

/// From now on threads that begin give up what they do not need: CAP_BPF, too, unless eBPF maps need it. Call it before any other
/// thread is there.
pub(super) fn begin(maps_need_capability: bool) {
    let _again = KEEP.set(kept(maps_need_capability));
}

/// What stays of all there is.
fn kept(maps_need_capability: bool) -> CapabilitySet {
    if maps_need_capability {
        KEPT | CapabilitySet::BPF
    } else {
        KEPT
    }
}

/// The first thing a thread does.
pub(super) fn give_up_here() {
    if let Some(keep) = KEEP.get()
        && let Err(error) = give_up(*keep)
    {
        // Found again, and said, once all of it has started.
        tracing::debug!(%error, "a thread keeps its capabilities");
    }
}

fn give_up(keep: CapabilitySet) -> io::Result<()> {
    let held = capabilities(None)?;
    if !keep.contains(held.permitted | held.inheritable) {
        if held.effective.contains(CapabilitySet::SETPCAP) {
            bound(keep)?;
        }
        clear_ambient_capability_set()?;
        set_capabilities(
            None,
            CapabilitySets {
                effective: held.effective & keep,
                permitted: held.permitted & keep,
                inheritable: CapabilitySet::empty(),
            },
        )?;
    }
    Ok(set_no_new_privs(true)?)
}

/// Not even a program that is started as root would have more.
fn bound(keep: CapabilitySet) -> io::Result<()> {
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        match capability_is_in_bounding_set(one) {
            Ok(true) if !keep.contains(one) => remove_capability_from_bounding_set(one)?,
            Ok(_) => (),
            // This kernel knows no further ones.
            Err(_unknown) => return Ok(()),
        }
    }
    Ok(())
}

/// The thread that started everything gives up its own, and waits until all others have. What is left in any of them is said.
pub(super) async fn finish() {
    let Some(keep) = KEEP.get() else { return };
    give_up_here();
    let done = || held_by_any_thread().is_ok_and(|held| keep.contains(held));
    wait_until(BEGIN_MAX, done).await;
    match held_by_any_thread() {
        Ok(held) if keep.contains(held) => {
            tracing::info!(kept = listed(held), "capabilities given up");
        }
        Ok(held) => tracing::warn!(
            kept = listed(held),
            "capabilities could not be given up: allow capset(2) and prctl(2) in the seccomp profile"
        ),
        Err(error) => tracing::warn!(
            %error,
            "whether every thread has given up its capabilities is not known: mount /proc"
        ),
    }
}

/// What at least one thread of this process could use, now.
///
/// # Errors
/// There is no `/proc`.
pub(super) fn held_by_any_thread() -> io::Result<CapabilitySet> {
    let mut held = CapabilitySet::empty();
    for thread in fs::read_dir("/proc/self/task")? {
        match fs::read_to_string(thread?.path().join("status")) {
            Ok(status) => held |= permitted(&status),
            // It has ended meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => (),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(held)
}

/// All that a thread has or could take, of its `/proc` text.
fn permitted(status: &str) -> CapabilitySet {
    let set = |name: &str| {
        let text = status.lines().find_map(|line| line.strip_prefix(name));
        text.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
            .unwrap_or(u64::MAX)
    };
    CapabilitySet::from_bits_retain(set("CapPrm:") | set("CapEff:") | set("CapInh:"))
}

/// For a line of the log.
fn listed(set: CapabilitySet) -> String {
    if set.is_empty() {
        return "none".to_owned();
    }
    names(set).join(",")
}

/// As capabilities(7) calls them; one that this program does not know is a number.
pub(super) fn names(set: CapabilitySet) -> Vec<String> {
    let mut names: Vec<String> = set
        .iter_names()
        .map(|(name, _)| format!("CAP_{name}"))
        .collect();
    let known = CapabilitySet::from_name("CHECKPOINT_RESTORE")
        .map_or(0, |last| last.bits().trailing_zeros() + 1);
    let unknown = (known..u64::BITS).filter(|bit| set.bits() >> bit & 1 == 1);
    names.extend(unknown.map(|bit| format!("CAP_{bit}")));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_could_be_turned_against_a_host_goes() {
        let dangerous = CapabilitySet::BPF
            | CapabilitySet::NET_ADMIN
            | CapabilitySet::NET_RAW
            | CapabilitySet::PERFMON
            | CapabilitySet::SYS_ADMIN
            | CapabilitySet::SYS_PTRACE
            | CapabilitySet::SYS_MODULE
            | CapabilitySet::SYS_RAWIO
            | CapabilitySet::SETUID
            | CapabilitySet::SETPCAP
            | CapabilitySet::from_bits_retain(1 << 63);
        assert_eq!(kept(false) & dangerous, CapabilitySet::empty());
        // Kernels that want it for tables that are open get it, and no more.
        assert_eq!(kept(true) & dangerous, CapabilitySet::BPF);
    }

    #[test]
    fn a_thread_holds_what_it_has_and_what_it_could_take() {
        let status = "Name:\tx\nCapInh:\t0000000000000400\nCapPrm:\t0000008000001000\nCapEff:\t0000000000000000\n";
        let held = names(permitted(status));
        assert_eq!(held, ["CAP_NET_BIND_SERVICE", "CAP_NET_ADMIN", "CAP_BPF"]);
        // Nothing known is everything.
        assert_eq!(permitted("").bits(), u64::MAX);
        assert_eq!(names(CapabilitySet::from_bits_retain(1 << 63)), ["CAP_63"]);
    }

    /// In a thread of its own, which ends with what it gave up.
    #[test]
    fn what_was_given_up_cannot_be_taken_back() {
        let thread = std::thread::spawn(|| {
            let before = capabilities(None).unwrap();
            give_up(KEPT).unwrap();
            let after = capabilities(None).unwrap();
            assert!(KEPT.contains(after.permitted) && KEPT.contains(after.effective));
            assert_eq!(after.permitted, before.permitted & KEPT);
            assert!(after.inheritable.is_empty());
            if !KEPT.contains(before.permitted) {
                assert!(set_capabilities(None, before).is_err());
                let bounded = capability_is_in_bounding_set(CapabilitySet::SYS_ADMIN);
                let could = before.effective.contains(CapabilitySet::SETPCAP);
                assert!(!could || bounded == Ok(false), "{bounded:?}");
            }
            assert!(rustix::thread::no_new_privs().unwrap());
            // Twice is once.
            give_up(KEPT).unwrap();
        });
        thread.join().unwrap();
    }
}
