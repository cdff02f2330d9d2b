//! The eBPF object loads: the committed one, and a freshly built one.

use std::path::PathBuf;

use adit_ebpf_abi::{ARRIVALS_MAX, ORIGINS_MAX, PROCESSES_MAX};
use adit_redirect::caps::HostCaps;
use adit_redirect::load_probe::try_programs;
use adit_redirect::object::{OBJECT, load};
use adit_redirect::redirect::Redirect;
use aya::Ebpf;
use aya::maps::Map;
use aya::programs::{Program, ProgramError};
use aya::util::online_cpus;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};

use crate::support::cgroup::Cgroup;
use crate::support::daemon::to_load;
use crate::support::privilege::{ready, say};

/// Path of a freshly built object. `cargo xtask test --nightly` sets it if the eBPF toolchain is installed.
const FRESH: &str = "ADIT_EBPF_OBJECT";

/// Limit (redirect): Programs of the committed eBPF object | pass the verifier of the running kernel
#[test]
fn every_program_of_the_committed_object_passes_the_verifier() {
    if ready("loading the committed object") {
        load_all(OBJECT);
    }
}

#[test]
fn every_program_of_a_freshly_built_object_passes_the_verifier() {
    let Some(path) = std::env::var_os(FRESH).map(PathBuf::from) else {
        // Not a failure, because a build does not require the eBPF toolchain.
        let why = format!(
            "{FRESH} names none; `cargo xtask test --nightly` does where the eBPF toolchain is"
        );
        say("loading a freshly built object", &why);
        return;
    };
    if ready("loading a freshly built object") {
        load_all(&std::fs::read(&path).unwrap());
    }
}

/// Kernels before 6.17 reserve 128 entries per processor. Without additional room a table would evict entries too early.
///
/// Limit (redirect): Kernel tables whose oldest entry is evicted | exempt processes: 4,096; redirected sockets: 65,536;
/// unaccepted connections: 16,384. Each has room for 128 more per processor
#[test]
fn lru_tables_have_room_beyond_the_entries_reserved_per_processor() {
    if !ready("the sizes of tables") {
        return;
    }
    let processors = u32::try_from(online_cpus().unwrap().len()).unwrap();
    let object = load(OBJECT).unwrap();
    for (name, entries) in [
        ("REDIRECT_PROCESSES", PROCESSES_MAX),
        ("REDIRECT_ORIGINS", ORIGINS_MAX),
        ("REDIRECT_ARRIVALS", ARRIVALS_MAX),
    ] {
        let Some(Map::LruHashMap(map)) = object.map(name) else {
            panic!("{name} is another kind of map");
        };
        let info = map.info().unwrap();
        assert_eq!(info.max_entries(), entries + 128 * processors, "{name}");
    }
}

/// Limit (rights): Capabilities to load the redirect | CAP_BPF and CAP_NET_ADMIN; before Linux 6.8 CAP_PERFMON, too
#[test]
fn the_least_privileges_are_enough_to_load_and_attach() {
    if !ready("the least privileges") {
        return;
    }
    let cgroup = Cgroup::new();
    let path = cgroup.path().to_owned();
    // Capabilities belong to threads, and this thread ends. The verifier is stricter without CAP_PERFMON.
    let programs = std::thread::spawn(move || {
        let least = to_load();
        let sets = CapabilitySets {
            effective: least,
            permitted: least,
            inheritable: CapabilitySet::empty(),
        };
        set_capabilities(None, sets).unwrap();
        let redirect = Redirect::attach(OBJECT, &path).unwrap();
        redirect.programs()
    });
    assert_eq!(programs.join().unwrap(), 5);
}

#[test]
fn adit_check_tries_every_program_of_the_object() {
    if !ready("what adit check tries") {
        return;
    }
    let all = loaded(&mut load(OBJECT).unwrap());
    assert_eq!(try_programs(OBJECT, |_name| true), Ok(all));
    let host = HostCaps::probe().with_programs();
    for tried in [&host.bpf, &host.account_program] {
        assert_eq!(tried.reason(), "the kernel takes Adit's own programs");
    }
}

fn load_all(object: &[u8]) {
    let loaded = loaded(&mut load(object).unwrap());
    assert!(loaded >= 6, "only {loaded} programs");
}

/// Loads all programs, and returns their number.
fn loaded(ebpf: &mut Ebpf) -> usize {
    let mut loaded = 0;
    for (name, program) in ebpf.programs_mut() {
        let outcome = match program {
            Program::CgroupSockAddr(program) => program.load(),
            Program::SockOps(program) => program.load(),
            other => panic!("{name}: nothing here loads {:?}", other.prog_type()),
        };
        if let Err(ProgramError::LoadError {
            io_error,
            verifier_log,
        }) = &outcome
        {
            panic!("{name}: {io_error}\n{verifier_log}");
        }
        outcome.unwrap();
        loaded += 1;
    }
    loaded
}
