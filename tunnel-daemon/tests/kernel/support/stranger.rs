//! An eBPF program of another project at `connect4` of a cgroup.

use std::fs::File;
use std::path::Path;

use adit_redirect::object::{OBJECT, load};
use aya::Ebpf;
use aya::programs::{CgroupAttachMode, CgroupSockAddr};

const OURS: &str = "adit_connect4";
/// Name of the foreign program, as long as the name of Adit's program.
pub(crate) const STRANGER: &str = "lbxx_connect4";

/// A program of Adit under another name. Without rules it leaves every call alone. Dropping it detaches it.
pub(crate) struct Stranger {
    id: u32,
    _attached: Ebpf,
}

impl Stranger {
    pub(crate) fn on(cgroup: &Path) -> Self {
        let mut object = OBJECT.to_vec();
        let places: Vec<usize> = (0..object.len() - OURS.len())
            .filter(|at| object[*at..].starts_with(OURS.as_bytes()))
            .collect();
        assert!(!places.is_empty(), "the object names its programs");
        for at in places {
            object[at..at + STRANGER.len()].copy_from_slice(STRANGER.as_bytes());
        }
        let mut loaded = load(&object).expect("the kernel takes its maps");
        let program = loaded.program_mut(STRANGER).expect("it has its new name");
        let program: &mut CgroupSockAddr = program.try_into().expect("one of these hooks");
        program.load().expect("the kernel takes it");
        let folder = File::open(cgroup).expect("the cgroup is there");
        program
            .attach(&folder, CgroupAttachMode::Single)
            .expect("there is room for it");
        let id = program.info().expect("it is loaded").id();
        Self {
            id,
            _attached: loaded,
        }
    }

    /// The kernel's id of the program.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }
}
