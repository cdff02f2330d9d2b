//! Changes of files, noticed by inotify on their directories. No thread is needed: the task that waits reads the events.

use std::collections::{BTreeSet, HashMap};
use std::future::pending;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use adit_host::files::{ReadError, Reader, STUCK_AFTER};
use futures_util::{FutureExt as _, StreamExt as _};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask};
use tokio::sync::Notify;

use crate::reread::Reread;

/// Wait after the first notification, so that a certificate and its key, written one after the other, are read as a
/// pair. A mismatch read in between would only be reported, never used.
const SETTLE: Duration = Duration::from_millis(100);
/// Buffer for the events of one read, each of at most 272 bytes.
const EVENT_BYTES: usize = 4096;

/// Files to watch, by the directories they are in.
pub struct Changes {
    names: BTreeSet<PathBuf>,
    asked: Arc<Notify>,
    /// `None`: the watch is not set up yet, or the system cannot watch files.
    watch: Option<Watch>,
    /// Sets the watch up. It may block, as the files may: meanwhile they are polled.
    setting_up: Option<Reader<(BTreeSet<PathBuf>, io::Result<Unread>)>>,
}

struct Watch {
    events: EventStream<Vec<u8>>,
    directories: HashMap<WatchDescriptor, PathBuf>,
}

/// A watch whose events are not read yet.
struct Unread(Inotify, HashMap<WatchDescriptor, PathBuf>);

impl Changes {
    /// Watches the files. A request of `reread` counts as a change, and so does the beginning of the watch. To be used on a
    /// runtime.
    #[must_use]
    pub fn of(paths: &[impl AsRef<Path>], reread: &Reread) -> Self {
        let asked = Arc::new(Notify::new());
        reread.tell(&asked);
        let paths = paths.iter().map(|path| path.as_ref().to_owned());
        Self {
            names: paths.clone().collect(),
            asked,
            watch: None,
            setting_up: Some(Reader::of(&paths.collect::<Vec<_>>())),
        }
    }

    /// Waits until a file may have changed and is likely written completely, or for `poll`. A cancelled call loses only the
    /// change whose writing it was waiting for.
    pub async fn next(&mut self, poll: Duration) {
        let asked = Arc::clone(&self.asked);
        tokio::select! {
            () = tokio::time::sleep(poll) => return,
            () = asked.notified() => tokio::time::sleep(SETTLE).await,
            () = self.changed() => tokio::time::sleep(SETTLE).await,
        }
        // The caller reads the files after this: earlier events need no further report.
        while self.watch.is_some() && self.event().now_or_never().is_some() {}
    }

    async fn changed(&mut self) {
        while !self.event().await {}
    }

    /// Completes once files are watched, or cannot be.
    async fn set_up(&mut self) {
        while let Some(reader) = &mut self.setting_up {
            let paths = self.names.clone();
            let work = move || {
                let names: BTreeSet<PathBuf> =
                    paths.iter().flat_map(|path| names_of(path)).collect();
                let watch = Unread::of(&names);
                (names, watch)
            };
            let watch = match reader.read(STUCK_AFTER, work).await {
                Ok((names, watch)) => {
                    self.names = names;
                    watch.and_then(Watch::of)
                }
                Err(ReadError::Pending { .. }) => continue,
                // This process ends, most likely with an error that is to be its last line.
                Err(ReadError::Lost) => {
                    self.setting_up = None;
                    return;
                }
            };
            self.setting_up = None;
            self.watch = watch
                .map_err(|error| {
                    tracing::warn!(%error, "cannot watch files for changes; they are polled");
                })
                .ok();
        }
    }

    /// Whether the next event may be a change.
    async fn event(&mut self) -> bool {
        if self.setting_up.is_some() {
            self.set_up().await;
            return true;
        }
        let Some(watch) = &mut self.watch else {
            return pending().await;
        };
        match watch.events.next().await {
            Some(Ok(event)) => watch.is_change(&event, &self.names),
            ended => {
                let error = ended.and_then(Result::err);
                let error = error.unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
                tracing::warn!(%error, "files are no longer watched for changes; they are polled");
                self.watch = None;
                true
            }
        }
    }
}

impl Unread {
    fn of(names: &BTreeSet<PathBuf>) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        let mask = WatchMask::MODIFY
            | WatchMask::CLOSE_WRITE
            | WatchMask::ATTRIB
            | WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::DELETE_SELF
            | WatchMask::MOVE_SELF;
        let mut directories = HashMap::new();
        let parents = names.iter().filter_map(|name| name.parent());
        for directory in parents.collect::<BTreeSet<&Path>>() {
            match inotify.watches().add(directory, mask) {
                Ok(watch) => drop(directories.insert(watch, directory.to_owned())),
                Err(error) => {
                    tracing::warn!(%error, directory = %directory.display(), "cannot watch a directory for changes; it is polled");
                }
            }
        }
        Ok(Self(inotify, directories))
    }
}

impl Watch {
    fn of(Unread(inotify, directories): Unread) -> io::Result<Self> {
        let events = inotify.into_event_stream(vec![0; EVENT_BYTES])?;
        Ok(Self {
            events,
            directories,
        })
    }

    /// Whether the files may have changed. A write to another file of the directory, such as a log, is no change. A link or
    /// name that appears, disappears or moves may be one, and so may a lost event.
    fn is_change(&self, event: &EventOwned, names: &BTreeSet<PathBuf>) -> bool {
        let inside_a_file = EventMask::MODIFY | EventMask::CLOSE_WRITE | EventMask::ATTRIB;
        if !event.mask.intersects(inside_a_file) {
            return true;
        }
        let (directory, name) = (self.directories.get(&event.wd), event.name.as_ref());
        directory
            .zip(name)
            .is_some_and(|(directory, name)| names.contains(&directory.join(name)))
    }
}

/// The names under which a change of `path` is reported: its own, and that of its current link target.
fn names_of(path: &Path) -> Vec<PathBuf> {
    let own = match path.parent() {
        // As the directory is watched.
        Some(parent) if parent.as_os_str().is_empty() => Path::new(".").join(path),
        _ => path.to_owned(),
    };
    let real = path.canonicalize().ok();
    std::iter::once(own).chain(real).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A log file in the same directory would otherwise cause a reload with each line.
    #[tokio::test]
    async fn other_files_of_the_directory_change_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let file = |name: &str| directory.path().join(name);
        let (ours, log) = (file("tls.crt"), file("server.log"));
        fs::write(&ours, "").unwrap();
        fs::write(&log, "").unwrap();
        let mut changes = Changes::of(&[&ours], &Reread::default());
        changes.set_up().await;
        // Two events each: write and close.
        let mut after = async |path: &Path, text: &str| {
            fs::write(path, text).unwrap();
            [changes.event().await, changes.event().await]
        };
        assert_eq!(after(&log, "a line").await, [false; 2]);
        assert_eq!(after(&ours, "garbage").await, [true; 2]);
        let fresh = file("fresh");
        assert!(
            after(&fresh, "").await[0],
            "another name may be a link's target"
        );
    }
}
