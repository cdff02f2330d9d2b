//! Processes that are part of the tunnel, by the ids that programs note, and which of them have ended: the kernel reuses an
//! id for an unrelated process.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;

/// Inode, in every kernel, of the initial process namespace, whose ids programs note.
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;
/// The first process of that namespace, which never ends.
const FIRST_PROCESS: u32 = 1;
/// Index of the start time in `/proc/PID/stat`, counted behind the name.
const BEGAN_AT: usize = 19;

/// Checks whether `/proc` shows all processes.
///
/// # Errors
/// Why it does not, and what to do about it.
pub fn visible() -> Result<(), &'static str> {
    let namespace = fs::metadata("/proc/self/ns/pid").map(|meta| meta.ino());
    if !namespace.is_ok_and(|inode| inode == FIRST_NAMESPACE) {
        return Err("this process is not in the host's process namespace (hostPID)");
    }
    // A hidden process looks like one that has ended.
    match Life::of(FIRST_PROCESS) {
        Life::Began(_) => Ok(()),
        Life::Ended | Life::Unknown => {
            Err("/proc hides the processes of other users (hidepid): mount it without that")
        }
    }
}

/// State of a process by `/proc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// Start time in ticks of the kernel's clock: two processes with one id differ in it.
    Began(u64),
    /// No process has this id.
    Ended,
    /// The entry cannot be read.
    Unknown,
}

impl Life {
    /// State of the process with this id.
    pub(super) fn of(id: u32) -> Self {
        match fs::read(format!("/proc/{id}/stat")) {
            Ok(stat) => began(&stat).map_or(Self::Unknown, Self::Began),
            // `ESRCH`: the process ended between opening and reading.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound
                    || error.raw_os_error() == Some(libc::ESRCH) =>
            {
                Self::Ended
            }
            Err(_unreadable) => Self::Unknown,
        }
    }
}

fn began(stat: &[u8]) -> Option<u64> {
    // The name may hold any byte, also `)`.
    let name_ends = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(stat.get(name_ends + 1..)?).ok()?;
    fields.split_ascii_whitespace().nth(BEGAN_AT)?.parse().ok()
}

/// Processes that were seen, with their start times.
#[derive(Debug, Default)]
pub(super) struct Processes {
    began: HashMap<u32, u64>,
}

impl Processes {
    /// Ids of `noted` whose processes have ended, or differ from those seen with these ids before.
    pub(super) fn over(&mut self, noted: &HashSet<u32>, life: impl Fn(u32) -> Life) -> Vec<u32> {
        self.began.retain(|id, _| noted.contains(id));
        let is_over = |id: &u32| match life(*id) {
            Life::Began(at) => *self.began.entry(*id).or_insert(at) != at,
            Life::Ended => true,
            Life::Unknown => false,
        };
        noted.iter().copied().filter(is_over).collect()
    }

    /// Forgets an id that is no longer noted: the next process noted with this id counts as new.
    pub(super) fn forgotten(&mut self, id: u32) {
        self.began.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Limit (redirect): An exempt process | exempt until it ends; its id is reused safely within about 1 s
    #[test]
    fn ended_processes_and_reused_ids_are_detected() {
        let mut processes = Processes::default();
        let all: HashSet<u32> = [7, 8, 9].into();
        assert!(processes.over(&all, |_| Life::Began(100)).is_empty());
        // An unreadable process is reported neither as ended nor as alive.
        let life = |id| match id {
            7 => Life::Began(200),
            8 => Life::Ended,
            _ => Life::Unknown,
        };
        let mut over = processes.over(&all, life);
        over.sort_unstable();
        assert_eq!(over, [7, 8]);
        // A process is reported as over until it is forgotten; after that its id counts as new.
        assert_eq!(processes.over(&[7].into(), life), [7]);
        processes.forgotten(7);
        assert!(processes.over(&[7].into(), life).is_empty());
        // Another program removed the entry meanwhile.
        assert!(processes.over(&HashSet::new(), life).is_empty());
        let later = |_| Life::Began(300);
        assert!(processes.over(&[7].into(), later).is_empty());
    }

    #[test]
    fn a_process_has_one_start_time_until_it_ends() {
        let own = Life::of(std::process::id());
        assert!(matches!(own, Life::Began(_)), "{own:?}");
        assert_eq!(Life::of(std::process::id()), own);
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        assert!(matches!(Life::of(child.id()), Life::Began(_)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(Life::of(child.id()), Life::Ended);
    }

    #[test]
    fn start_time_is_parsed_after_any_process_name() {
        let fields = "S 1 2 2 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        for name in ["a", "a b) S 1 (", ""] {
            assert_eq!(began(format!("9 ({name}) {fields}").as_bytes()), Some(4711));
        }
        for broken in ["", "9 (a", "9 (a)", "9 (a) S 1"] {
            assert_eq!(began(broken.as_bytes()), None);
        }
    }
}
