//! Capabilities of the process beyond those of its user, and how it gives them up.
//!
//! The kernel keeps capabilities per thread. Each thread gives them up as it begins. The thread that starts the server or
//! agent keeps them until startup is done: it attaches programs, marks sockets and listens on low ports. Nothing can be
//! regained: the permitted set and the bounding set shrink, too, and so a started program gains none.

use std::fs;
use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, remove_capability_from_bounding_set, set_capabilities,
    set_no_new_privs,
};

use crate::capabilities::set_of;
use crate::wait::wait_until;

/// Time for newly created threads to give up their capabilities.
const BEGIN_MAX: Duration = Duration::from_secs(5);
/// Capabilities that a process may keep: ports below 1024; limits of its user's memory and pipes; files of other users, which
/// are reread when they change. A process of root could do worse with root's own files.
const KEPT: CapabilitySet = CapabilitySet::NET_BIND_SERVICE
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::SYS_RESOURCE);

/// Capabilities that threads keep; unset: nothing is given up.
static KEEP: OnceLock<CapabilitySet> = OnceLock::new();

/// From now on each thread gives up capabilities at its start: CAP_BPF, too, unless eBPF maps need it. Call this before the
/// process has other threads.
pub fn begin(maps_need_capability: bool) {
    let _again = KEEP.set(kept(maps_need_capability));
}

/// The capabilities that threads keep.
fn kept(maps_need_capability: bool) -> CapabilitySet {
    if maps_need_capability {
        KEPT | CapabilitySet::BPF
    } else {
        KEPT
    }
}

/// Gives up this thread's capabilities; every thread calls this first.
pub fn give_up_here() {
    if let Some(keep) = KEEP.get()
        && let Err(error) = give_up(*keep)
    {
        // `finish` checks all threads again and logs what remains.
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

/// Shrinks the bounding set, so that not even a program started as root has more.
fn bound(keep: CapabilitySet) -> io::Result<()> {
    for bit in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        match capability_is_in_bounding_set(one) {
            Ok(true) if !keep.contains(one) => remove_capability_from_bounding_set(one)?,
            Ok(_) => (),
            // The kernel knows no capability from this number on.
            Err(_unknown) => return Ok(()),
        }
    }
    Ok(())
}

/// Gives up the starting thread's capabilities, waits until all other threads have, and logs what any thread still has.
pub async fn finish() {
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

/// Capabilities that at least one thread of this process has now.
///
/// # Errors
/// `/proc` is not mounted.
pub fn held_by_any_thread() -> io::Result<CapabilitySet> {
    let mut held = CapabilitySet::empty();
    for thread in fs::read_dir("/proc/self/task")? {
        match fs::read_to_string(thread?.path().join("status")) {
            Ok(status) => held |= permitted(&status),
            // The thread has ended meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => (),
            Err(error) if Errno::from_io_error(&error) == Some(Errno::SRCH) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(held)
}

/// The permitted capabilities of a thread, from its `/proc` status text.
fn permitted(status: &str) -> CapabilitySet {
    let all = CapabilitySet::from_bits_retain(u64::MAX);
    let set = |name| set_of(status, name).unwrap_or(all);
    set("CapPrm:") | set("CapEff:") | set("CapInh:")
}

/// A list for a line of the log.
fn listed(set: CapabilitySet) -> String {
    if set.is_empty() {
        return "none".to_owned();
    }
    names(set).join(",")
}

/// Names as in capabilities(7); a capability that this program does not know is a number.
pub fn names(set: CapabilitySet) -> Vec<String> {
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
    fn dangerous_capabilities_are_dropped() {
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
        // Kernels that require CAP_BPF for open maps keep it, and no other dangerous capability.
        assert_eq!(kept(true) & dangerous, CapabilitySet::BPF);
    }

    #[test]
    fn permitted_and_inheritable_capabilities_count_as_held() {
        let status = "Name:\tx\nCapInh:\t0000000000000400\nCapPrm:\t0000008000001000\nCapEff:\t0000000000000000\n";
        let held = names(permitted(status));
        assert_eq!(held, ["CAP_NET_BIND_SERVICE", "CAP_NET_ADMIN", "CAP_BPF"]);
        // Unknown capabilities count as all capabilities.
        assert_eq!(permitted("").bits(), u64::MAX);
        assert_eq!(names(CapabilitySet::from_bits_retain(1 << 63)), ["CAP_63"]);
    }

    /// Runs in a separate thread, because the thread gives up its capabilities for good.
    #[test]
    fn dropped_capabilities_cannot_be_regained() {
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
            // A second call changes nothing.
            give_up(KEPT).unwrap();
        });
        thread.join().unwrap();
    }
}
