//! The eBPF object that is part of this program, and loading it.

use adit_ebpf_abi::{ARRIVALS_MAX, ORIGINS_MAX, PROCESSES_MAX};
use aya::util::online_cpus;
use aya::{Ebpf, EbpfError, EbpfLoader};

use crate::caps::deepest;

/// The committed object, as `cargo xtask ebpf` built it.
pub static OBJECT: &[u8] =
    aya::include_bytes_aligned!("../../../ebpf-programs/prebuilt/adit-ebpf.o");

/// The program of the object that counts for accounting. All others are the redirect's.
pub const ACCOUNT_PROGRAM: &str = "adit_account_ops";

/// Why the kernel side of a feature is missing.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The kernel or a privilege does not allow the object.
    #[error("cannot load the eBPF object: {}; {REMEDY}", deepest(.0))]
    Load(#[from] EbpfError),
    /// The kernel refused one program.
    #[error("cannot {action} the eBPF program {program}: {cause}; {REMEDY}")]
    Program {
        /// `load` or `attach`.
        action: &'static str,
        /// Name in the object.
        program: &'static str,
        /// The kernel's error.
        cause: String,
    },
    /// A map refused an entry.
    #[error("the eBPF map {map}: {cause}")]
    Map {
        /// Name in the object.
        map: &'static str,
        /// The kernel's error.
        cause: String,
    },
    /// The cgroup cannot be opened.
    #[error("cannot open the cgroup {path}: {cause}; name a folder of the cgroup2 file system")]
    Cgroup {
        /// As given.
        path: String,
        /// The kernel's error.
        cause: String,
    },
    /// Programs cannot be made to outlive the process.
    #[error("cannot pin the programs of the cgroup {path}: {cause}")]
    Pin {
        /// As given.
        path: String,
        /// The kernel's error, or what is missing.
        cause: String,
    },
    /// The object lacks a part: it was built from other sources.
    #[error("the eBPF object has no {0}: build it again with `cargo xtask ebpf`")]
    NotInObject(&'static str),
    /// Running processes cannot be told from ended ones.
    #[error("cannot see which processes have ended: {0}")]
    Processes(&'static str),
    /// The kernel does not tell namespaces apart.
    #[error("cannot ask for the network namespace: {0}; Linux 5.14 or newer can")]
    Namespace(std::io::Error),
}

const REMEDY: &str = "it needs CAP_BPF and CAP_NET_ADMIN and a seccomp profile that allows bpf(2); `adit check` says more";

/// Maps of accounting, which loads the object for itself, and their smallest sizes: entries, or bytes of a ring of whole
/// pages.
const OF_ACCOUNTING: [(&str, u32); 2] = [("ACCOUNT_SOCKETS", 64), ("ACCOUNT_CLOSED", 64 * 1024)];

/// LRU maps that the redirect's programs write, and the entries that they must have room for.
const OF_REDIRECT: [(&str, u32); 3] = [
    ("REDIRECT_PROCESSES", PROCESSES_MAX),
    ("REDIRECT_ORIGINS", ORIGINS_MAX),
    ("REDIRECT_ARRIVALS", ARRIVALS_MAX),
];
/// Entries of an LRU map that each processor sets aside for itself, used or not. Before Linux 6.17 a table of 4,096 is full
/// once 32 processors have put one entry in it each, and then evicts entries that are in use.
const SET_ASIDE: u32 = 128;

/// Room for `entries`, and for what the processors of this host set aside.
pub(super) fn with_set_aside(entries: u32) -> u32 {
    beside(entries, online_cpus().map_or(1, |online| online.len()))
}

fn beside(entries: u32, processors: usize) -> u32 {
    let processors = u32::try_from(processors).unwrap_or(u32::MAX);
    entries.saturating_add(processors.saturating_mul(SET_ASIDE))
}

/// Creates the maps of an object, without room for accounting, and relocates its programs. Programs are loaded one by one
/// when they are attached.
///
/// # Errors
/// The kernel's error.
pub fn load(object: &[u8]) -> Result<Ebpf, KernelError> {
    let mut loader = EbpfLoader::new();
    for (map, size) in OF_ACCOUNTING {
        loader.map_max_entries(map, size);
    }
    for (map, entries) in OF_REDIRECT {
        loader.map_max_entries(map, with_set_aside(entries));
    }
    Ok(loader.load(object)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn map_size_adds_entries_reserved_by_processors() {
        for (processors, room) in [(0, 4096), (1, 4224), (64, 12_288), (usize::MAX, u32::MAX)] {
            assert_eq!(beside(4096, processors), room);
        }
        assert!(with_set_aside(PROCESSES_MAX) > PROCESSES_MAX);
    }
}
