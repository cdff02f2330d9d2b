//! The eBPF object that is part of this program, and loading it.

use aya::{Ebpf, EbpfError, EbpfLoader};

use super::caps::deepest;

/// The committed object, as `cargo xtask ebpf` built it.
pub static OBJECT: &[u8] =
    aya::include_bytes_aligned!("../../../ebpf-programs/prebuilt/adit-ebpf.o");

/// Why the kernel side of a feature is not there.
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
        /// As in the object.
        program: &'static str,
        /// What the kernel said.
        cause: String,
    },
    /// A map refused an entry.
    #[error("the eBPF map {map}: {cause}")]
    Map {
        /// As in the object.
        map: &'static str,
        /// What the kernel said.
        cause: String,
    },
    /// The cgroup cannot be opened.
    #[error("cannot open the cgroup {path}: {cause}; name a folder of the cgroup2 file system")]
    Cgroup {
        /// As given.
        path: String,
        /// What the kernel said.
        cause: String,
    },
    /// Programs cannot be made to outlive the process.
    #[error("cannot pin the programs of the cgroup {path}: {cause}")]
    Pin {
        /// As given.
        path: String,
        /// What the kernel said, or what is missing.
        cause: String,
    },
    /// Something of the object is not there: it was built from other sources.
    #[error("the eBPF object has no {0}: build it again with `cargo xtask ebpf`")]
    NotInObject(&'static str),
    /// It cannot be told which processes there are.
    #[error("cannot see which processes have ended: {0}")]
    Processes(&'static str),
    /// The kernel does not tell namespaces apart.
    #[error("cannot ask for the network namespace: {0}; Linux 5.14 or newer can")]
    Namespace(std::io::Error),
}

const REMEDY: &str = "it needs CAP_BPF and CAP_NET_ADMIN and a seccomp profile that allows bpf(2); `adit check` says more";

/// Maps of accounting, which loads the object for itself, and how small they can be: entries, or bytes of a ring of whole pages.
const OF_ACCOUNTING: [(&str, u32); 2] = [("ACCOUNT_SOCKETS", 64), ("ACCOUNT_CLOSED", 64 * 1024)];

/// Creates the maps of an object, without room for accounting, and relocates its programs. Programs are loaded one by one, by
/// those who attach them.
///
/// # Errors
/// What the kernel said.
pub fn load(object: &[u8]) -> Result<Ebpf, KernelError> {
    let mut loader = EbpfLoader::new();
    for (map, size) in OF_ACCOUNTING {
        loader.map_max_entries(map, size);
    }
    Ok(loader.load(object)?)
}
