//! Finds network namespaces: those of given files, and those of a cgroup's processes.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::wire::Asked;
use adit_config::NetnsHelperOptions;

/// Folders of a cgroup that are searched. A node has some thousand.
pub const FOLDERS_MAX: usize = 16_384;
/// Processes that are searched.
pub const PROCESSES_MAX: usize = 65_536;

/// Result of a search.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// By inode, each once, never our own; given files first.
    pub(super) namespaces: Vec<Namespace>,
    /// Given files that exist and cannot be read.
    pub(super) failed: Vec<(PathBuf, io::Error)>,
    /// Processes whose namespace cannot be read.
    pub(super) unreadable: usize,
    /// The search hit a limit: namespaces that were not found may exist.
    pub(super) is_cut: bool,
    /// Inodes of [`Self::namespaces`].
    known: HashSet<u64>,
}

/// Limits of a search.
#[derive(Clone, Copy, Debug)]
struct Most {
    folders: usize,
    processes: usize,
}

/// A network namespace.
#[derive(Debug)]
pub(super) struct Namespace {
    /// The inode, unique while the namespace is held open.
    pub(super) id: u64,
    /// A path to the namespace.
    pub(super) path: PathBuf,
}

impl Found {
    pub(super) fn look(options: &NetnsHelperOptions, own: u64) -> Self {
        let mut found = Self::default();
        for path in &options.paths {
            match fs::metadata(path) {
                Ok(meta) => found.add(meta.ino(), path, own),
                // The namespace does not exist yet, or no longer exists.
                Err(error) if error.kind() == io::ErrorKind::NotFound => (),
                Err(error) => found.failed.push((path.clone(), error)),
            }
        }
        if let Some(cgroup) = &options.cgroup {
            let most = Most {
                folders: FOLDERS_MAX,
                processes: PROCESSES_MAX,
            };
            found.in_cgroup(cgroup, own, most);
        }
        found
    }

    fn add(&mut self, id: u64, path: &Path, own: u64) {
        if id != own && self.known.insert(id) {
            let path = path.to_owned();
            self.namespaces.push(Namespace { id, path });
        }
    }

    /// The ids of `held` that still exist. After a search that was cut: all of them, since they may exist.
    pub(super) fn still(&self, held: &[u64]) -> Vec<u64> {
        let is_there = |id: &u64| self.is_cut || self.known.contains(id);
        held.iter().copied().filter(is_there).collect()
    }

    /// Found namespaces that `held` lists as wanting IPv6.
    pub(super) fn wanting_v6(&self, held: &[Asked]) -> Vec<&Namespace> {
        let wants = |namespace: &&Namespace| {
            let mut held = held.iter();
            held.any(|held| held.wants_v6 && held.id == namespace.id)
        };
        self.namespaces.iter().filter(wants).collect()
    }

    /// Takes out the namespaces that are not held, up to `room`; also returns how many exceed it.
    pub(super) fn fresh(&mut self, held: &[u64], room: usize) -> (Vec<Namespace>, usize) {
        let mut fresh = std::mem::take(&mut self.namespaces);
        fresh.retain(|namespace| !held.contains(&namespace.id));
        let over = fresh.len().saturating_sub(room);
        fresh.truncate(room);
        (fresh, over)
    }

    fn in_cgroup(&mut self, cgroup: &Path, own: u64, most: Most) {
        let mut folders = vec![cgroup.to_owned()];
        let (mut looked, mut processes) = (0, 0);
        while let Some(folder) = folders.pop() {
            looked += 1;
            if looked > most.folders {
                self.is_cut = true;
                return;
            }
            // A folder that was removed meanwhile has no members.
            let members = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            for process in members.lines() {
                // The process is outside our process namespace.
                if process == "0" {
                    self.unreadable += 1;
                    continue;
                }
                processes += 1;
                if processes > most.processes {
                    self.is_cut = true;
                    return;
                }
                let path = Path::new("/proc").join(process).join("ns/net");
                match fs::metadata(&path) {
                    Ok(meta) => self.add(meta.ino(), &path, own),
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                        self.unreadable += 1;
                    }
                    Err(_gone) => (),
                }
            }
            let below = fs::read_dir(&folder).into_iter().flatten().flatten();
            folders.extend(
                below
                    .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                    .map(|entry| entry.path()),
            );
        }
    }
}

impl Namespace {
    /// Opens the namespace, if the path still leads to it.
    pub(super) fn open(&self) -> io::Result<File> {
        let file = File::open(&self.path)?;
        if file.metadata()?.ino() != self.id {
            return Err(io::Error::other(
                "the path now names another network namespace",
            ));
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_found_once_and_never_our_own() {
        let own: PathBuf = "/proc/self/ns/net".into();
        let id = fs::metadata(&own).unwrap().ino();
        let options = |paths: &[&Path]| NetnsHelperOptions {
            mark: 0,
            cgroup: None,
            paths: paths.iter().map(|path| path.to_path_buf()).collect(),
        };
        assert!(Found::look(&options(&[&own]), id).namespaces.is_empty());
        let twice = Found::look(&options(&[&own, Path::new("/proc/thread-self/ns/net")]), 0);
        assert_eq!(twice.namespaces.len(), 1);
        assert!(twice.namespaces[0].open().is_ok());
        let missing = Found::look(&options(&[Path::new("/nowhere/at/all")]), id);
        assert!(missing.namespaces.is_empty() && missing.failed.is_empty());
    }

    /// Otherwise its listener would close, and calls from the namespace would not be redirected, only because a search
    /// was cut short.
    #[test]
    fn namespaces_missing_from_an_incomplete_scan_are_kept() {
        let dir = tempfile::TempDir::new().unwrap();
        let us = std::process::id();
        fs::write(dir.path().join("cgroup.procs"), format!("{us}\n{us}\n")).unwrap();
        let most = |folders, processes| Most { folders, processes };
        for (most, is_cut) in [
            (most(1, 2), false),
            (most(9, 9), false),
            (most(1, 1), true),
            (most(0, 2), true),
        ] {
            let mut found = Found::default();
            found.in_cgroup(dir.path(), 0, most);
            assert_eq!(found.is_cut, is_cut, "{most:?}");
            let ours = found.namespaces.first().map_or(0, |found| found.id);
            let elsewhere = ours.wrapping_add(1);
            let mut still = vec![ours, elsewhere];
            still.truncate(if is_cut { 2 } else { 1 });
            assert_eq!(found.still(&[ours, elsewhere]), still, "{most:?}");
        }
    }

    /// Namespaces that a search did not reach stay, and use up room for others. The number of namespaces left out must be
    /// known.
    ///
    /// Limit (redirect): Captured network namespaces besides the own one
    #[test]
    fn namespaces_above_the_limit_are_counted() {
        let found = |ids: std::ops::Range<u64>| Found {
            namespaces: ids
                .map(|id| Namespace {
                    id,
                    path: PathBuf::new(),
                })
                .collect(),
            is_cut: true,
            ..Found::default()
        };
        for (ids, held, room, fresh, over) in [
            (1..4, &[][..], 3, vec![1, 2, 3], 0),
            (1..4, &[2], 2, vec![1, 3], 0),
            (1..4, &[2], 1, vec![1], 1),
            (1..2, &[7, 8], 0, vec![], 1),
        ] {
            let (taken, left) = found(ids).fresh(held, room);
            let taken: Vec<u64> = taken.into_iter().map(|namespace| namespace.id).collect();
            assert_eq!((taken, left), (fresh, over), "{held:?} {room}");
        }
    }

    #[test]
    fn found_namespaces_that_want_ipv6_are_selected() {
        let held = [(1, false), (2, true), (3, true)];
        let held = held.map(|(id, wants_v6)| Asked { id, wants_v6 });
        let mut found = Found::default();
        for id in [1, 2, 4] {
            found.add(id, Path::new(""), 0);
        }
        let wanting = found.wanting_v6(&held);
        let wanting: Vec<u64> = wanting.iter().map(|namespace| namespace.id).collect();
        assert_eq!(wanting, [2]);
    }

    #[test]
    fn processes_of_child_cgroups_are_found() {
        // A folder that looks like a cgroup.
        let dir = tempfile::TempDir::new().unwrap();
        fs::create_dir(dir.path().join("pod")).unwrap();
        fs::write(dir.path().join("cgroup.procs"), "0\n").unwrap();
        let us = std::process::id().to_string();
        fs::write(dir.path().join("pod/cgroup.procs"), us).unwrap();
        let options = NetnsHelperOptions {
            mark: 0,
            cgroup: Some(dir.path().to_owned()),
            paths: Vec::new(),
        };
        assert_eq!(Found::look(&options, 0).namespaces.len(), 1);
    }
}
