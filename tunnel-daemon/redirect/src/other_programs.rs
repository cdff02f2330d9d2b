//! Foreign programs that run when processes of a captured cgroup connect: which, and whether before or after ours.
//!
//! Listing a cgroup's programs takes CAP_NET_ADMIN, as attaching ours does. Their names take CAP_SYS_ADMIN, as opening any
//! eBPF object by its number does.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};

use aya::programs::{ProgramError, loaded_programs};

use crate::command;

/// Cgroups that are searched, the captured one and those below it.
const CGROUPS_MAX: usize = 1024;
/// Programs of one hook that are asked for. The kernel takes 64 on each cgroup, and adds up those of the cgroups above.
const PROGRAMS_MAX: u32 = 1024;

/// Hooks where programs rewrite the address of a connect call, by the kernel's numbers.
const HOOKS: [(&str, u32); 2] = [("connect4", 10), ("connect6", 11)];
/// Programs on the cgroup itself.
const ATTACHED: u32 = 0;
/// `BPF_F_QUERY_EFFECTIVE`: all programs that run for processes of the cgroup itself, in the order in which they run.
/// Programs of cgroups above are included.
const EFFECTIVE: u32 = 1;

/// When a program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Before ours: our rules see the destination that it leaves.
    Before,
    /// After ours: it sees the destination that ours leave.
    Behind,
    /// Before ours, for processes of a cgroup below the captured one.
    Below,
}

/// A foreign program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherProgram {
    /// Where it is attached.
    pub hook: &'static str,
    /// The kernel's number of the program.
    pub id: u32,
    /// Its name, where known.
    pub name: Option<String>,
    /// When it runs.
    pub place: Place,
}

impl fmt::Display for OtherProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.hook, self.id)?;
        if let Some(name) = &self.name {
            write!(f, " {name}")?;
        }
        f.write_str(match self.place {
            Place::Before => ", before ours",
            Place::Behind => ", behind ours",
            Place::Below => ", before ours, on a cgroup below",
        })
    }
}

/// All foreign programs that were found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherPrograms {
    /// In the order in which they run, hook by hook; those on cgroups below come last.
    pub programs: Vec<OtherProgram>,
    /// Why the names are unknown, if they are.
    nameless: Option<String>,
    /// Some cgroups below were not searched.
    unseen: bool,
}

impl OtherPrograms {
    /// What is not known about the programs, and why.
    #[must_use]
    pub fn unknown(&self) -> Option<String> {
        let unseen = self
            .unseen
            .then_some("not all cgroups below were looked at");
        let parts: Vec<&str> = self.nameless.as_deref().into_iter().chain(unseen).collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// Adds a program once for a hook, on however many cgroups it is.
    fn note(&mut self, hook: &'static str, id: u32, place: Place) {
        let is_it = |known: &OtherProgram| known.hook == hook && known.id == id;
        if !self.programs.iter().any(is_it) {
            self.programs.push(OtherProgram {
                hook,
                id,
                name: None,
                place,
            });
        }
    }

    fn look_below(&mut self, cgroup: &Path, own: &[u32]) -> io::Result<()> {
        let cgroup = File::open(cgroup)?;
        for (hook, number) in HOOKS {
            for id in query(cgroup.as_fd(), number, ATTACHED)? {
                if !own.contains(&id) {
                    self.note(hook, id, Place::Below);
                }
            }
        }
        Ok(())
    }

    fn name(&mut self) {
        match names() {
            Ok(names) => {
                for program in &mut self.programs {
                    program.name = names.get(&program.id).cloned();
                }
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                self.nameless = Some("names unknown: they take CAP_SYS_ADMIN".to_owned());
            }
            Err(error) => self.nameless = Some(format!("names unknown: {error}")),
        }
    }
}

/// Foreign programs at the connect hooks that run for processes of a cgroup or of those below it. `own` are the numbers of
/// our programs.
///
/// # Errors
/// The kernel does not list them, which takes CAP_NET_ADMIN: there may be some.
pub fn other_programs(cgroup: &Path, own: &[u32]) -> io::Result<OtherPrograms> {
    let mut found = OtherPrograms::default();
    let here = File::open(cgroup)?;
    for (hook, number) in HOOKS {
        let mut place = Place::Before;
        for id in query(here.as_fd(), number, EFFECTIVE)? {
            if own.contains(&id) {
                place = Place::Behind;
            } else {
                found.note(hook, id, place);
            }
        }
    }
    let (cgroups, all) = with_those_below(cgroup, CGROUPS_MAX);
    found.unseen = !all;
    for below in cgroups.iter().skip(1) {
        match found.look_below(below, own) {
            Ok(()) => (),
            // The cgroup has gone meanwhile, and its programs with it.
            Err(gone) if gone.kind() == io::ErrorKind::NotFound => (),
            Err(_refused) => found.unseen = true,
        }
    }
    if !found.programs.is_empty() {
        found.name();
    }
    Ok(found)
}

/// A cgroup and those below it, level by level, and whether these are all.
fn with_those_below(cgroup: &Path, max: usize) -> (Vec<PathBuf>, bool) {
    let (mut found, mut all, mut looked) = (vec![cgroup.to_owned()], true, 0);
    while let Some(folder) = found.get(looked) {
        looked += 1;
        let entries = match fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(gone) if gone.kind() == io::ErrorKind::NotFound => continue,
            Err(_refused) => {
                all = false;
                continue;
            }
        };
        for entry in entries {
            let Ok(entry) = entry else {
                all = false;
                continue;
            };
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if found.len() == max {
                return (found, false);
            }
            found.push(entry.path());
        }
    }
    (found, all)
}

/// Names of all programs on this host, by their numbers.
fn names() -> io::Result<HashMap<u32, String>> {
    let mut names = HashMap::new();
    for program in loaded_programs() {
        let program = match program {
            Ok(program) => program,
            Err(ProgramError::SyscallError(refused)) => match refused.io_error.kind() {
                // The program has gone meanwhile.
                io::ErrorKind::NotFound => continue,
                _ => return Err(refused.io_error),
            },
            Err(other) => return Err(io::Error::other(other)),
        };
        if let Some(name) = program.name_as_str().filter(|name| !name.is_empty()) {
            names.insert(program.id(), name.to_owned());
        }
    }
    Ok(names)
}

/// Arguments and answer of bpf(2), with all fields that kernels know: newer kernels write `revision`, whatever length they
/// are given.
#[repr(C)]
#[derive(Default)]
struct Query {
    cgroup: u32,
    hook: u32,
    flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    padding: u32,
    /// Lists that are not requested.
    more: [u64; 3],
    revision: u64,
}
const _: () = assert!(size_of::<Query>() == 64);

/// Numbers of the programs at a hook of a cgroup.
#[expect(unsafe_code, reason = "no crate asks this of these hooks")]
fn query(cgroup: BorrowedFd<'_>, hook: u32, flags: u32) -> io::Result<Vec<u32>> {
    let mut ids = vec![0_u32; PROGRAMS_MAX as usize];
    let mut query = Query {
        cgroup: cgroup.as_raw_fd().cast_unsigned(),
        hook,
        flags,
        ids: ids.as_mut_ptr().expose_provenance() as u64,
        count: PROGRAMS_MAX,
        ..Query::default()
    };
    // SAFETY: the descriptor is borrowed, so it stays open for the call. The last field of the query is the last that the
    // kernel writes. The numbers are as many as `count` says, and stay where they are until this function ends, since
    // nothing is pushed; the kernel writes no more than that many.
    let _zero = unsafe { command::bpf(command::PROG_QUERY, &mut query) }?;
    ids.truncate(query.count as usize);
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_listed_with_id_position_and_known_names() {
        let mut found = OtherPrograms::default();
        found.note("connect4", 7, Place::Before);
        found.note("connect4", 7, Place::Below);
        found.note("connect6", 7, Place::Behind);
        assert_eq!(found.unknown(), None);
        let texts = |found: &OtherPrograms| {
            let programs = found.programs.iter();
            programs.map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            texts(&found),
            ["connect4 7, before ours", "connect6 7, behind ours"]
        );
        found.programs[0].name = Some("lb".to_owned());
        assert_eq!(texts(&found)[0], "connect4 7 lb, before ours");
        found.nameless = Some("names unknown: no".to_owned());
        found.unseen = true;
        assert_eq!(
            found.unknown().as_deref(),
            Some("names unknown: no; not all cgroups below were looked at")
        );
    }

    #[test]
    fn cgroups_beyond_the_search_limit_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("a/b/c");
        fs::create_dir_all(&inner).unwrap();
        fs::write(root.path().join("cgroup.procs"), "").unwrap();
        let (found, all) = with_those_below(root.path(), 4);
        assert_eq!((found.len(), found.last(), all), (4, Some(&inner), true));
        let (found, all) = with_those_below(root.path(), 3);
        assert_eq!((found.len(), all), (3, false));
    }
}
