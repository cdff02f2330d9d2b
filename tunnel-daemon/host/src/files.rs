//! Files whose reading may block: pipes, devices, and mounts whose server does not answer.
//!
//! It does not know what the files are for.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::Duration;

use rustix::fs::{OFlags, fstatfs};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::blocking;

/// A file that has not been read after this time counts as stuck: a disk answers within milliseconds.
pub const STUCK_AFTER: Duration = Duration::from_secs(5);

/// Opens a regular file for reading. A pipe without a writer does not block, and is refused as any other kind is.
///
/// # Errors
/// The file cannot be opened, or is no regular file.
pub fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits().cast_signed())
        .open(path);
    let file = match opened {
        // A socket cannot be opened at all.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
            return Err(wrong_kind("a socket or a device without a driver"));
        }
        opened => opened?,
    };
    let kind = file.metadata()?.file_type();
    if kind.is_file() {
        Ok(file)
    } else {
        Err(wrong_kind(name_of(kind)))
    }
}

fn wrong_kind(kind: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidInput,
        format!("it is {kind}, not a regular file"),
    )
}

fn name_of(kind: FileType) -> &'static str {
    if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_dir() {
        "a directory"
    } else {
        "a device"
    }
}

/// What users besides a file's owner may do with it, by its mode.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OthersMay {
    /// Its group or all users.
    Write,
    /// All users. Not on a tmpfs, such as a Secret that Kubernetes mounts: it reaches this container only.
    Read,
}

/// What users besides the owner may do with a file; `None`: nothing, or the file cannot be opened.
#[must_use]
pub fn others_may(path: &Path) -> Option<OthersMay> {
    const WRITE: u32 = 0o022;
    const READ: u32 = 0o004;
    const TMPFS: u32 = 0x0102_1994;
    let file = open(path).ok()?;
    let mode = file.metadata().ok()?.mode();
    let is_tmpfs = || fstatfs(&file).is_ok_and(|system| u32::try_from(system.f_type) == Ok(TMPFS));
    if mode & WRITE != 0 {
        Some(OthersMay::Write)
    } else if mode & READ != 0 && !is_tmpfs() {
        Some(OthersMay::Read)
    } else {
        None
    }
}

/// Why reading has no result yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ReadError {
    /// It takes long, and goes on.
    #[error("the files have not been read yet; is their mount reachable?")]
    Pending {
        /// It has just been found to be stuck: true once for each reading.
        is_stuck_now: bool,
    },
    /// It panicked, or the process is shutting down.
    #[error("reading the files was cut off")]
    Lost,
}

/// Reads some files again and again, on a thread for blocking work. Only one reading is under way at a time: files that never
/// answer hold one thread.
pub struct Reader<T> {
    files: String,
    running: Option<Running<T>>,
}

impl<T: Send + 'static> Reader<T> {
    /// `files`: their names, for the log.
    #[must_use]
    pub fn new(files: impl Into<String>) -> Self {
        Self {
            files: files.into(),
            running: None,
        }
    }

    /// A reader of files with these names.
    #[must_use]
    pub fn of(paths: &[impl AsRef<Path>]) -> Self {
        Self::new(names(paths))
    }

    /// The result of the reading under way, else of `work`. After `patience` the reading goes on, and a later call gets its
    /// result. So it does when this call is dropped. Files that are stuck are named in the log.
    ///
    /// # Errors
    /// See [`ReadError`].
    pub async fn read(
        &mut self,
        patience: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ReadError> {
        let running = self.running.get_or_insert_with(|| Running::begin(work));
        let result = running.within(patience, &self.files).await;
        if !matches!(result, Err(ReadError::Pending { .. })) {
            self.running = None;
        }
        result
    }

    /// Whether a reading is under way that no call waits for.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.running.is_some()
    }
}

/// Reads files once, however long it takes: for a start, which a signal can end meanwhile. Files that are stuck are named in
/// the log.
///
/// # Errors
/// [`ReadError::Lost`].
pub async fn read_once<T: Send + 'static>(
    files: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ReadError> {
    let mut running = Running::begin(work);
    loop {
        match running.within(STUCK_AFTER, files).await {
            Err(ReadError::Pending { .. }) => (),
            ended => return ended,
        }
    }
}

/// Does `work` on a thread of its own, before there is a runtime. Work that takes longer than `limit` is left behind.
///
/// # Errors
/// It takes too long, or the host refuses the thread.
pub fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (tell, told) = sync_channel(1);
    let work = move || drop(tell.send(work()));
    thread::Builder::new()
        .name("adit-files".to_owned())
        .spawn(work)?;
    told.recv_timeout(limit).map_err(|_late_or_panicked| {
        let seconds = limit.as_secs();
        let why = format!("it has not been read after {seconds} s; is its mount reachable?");
        io::Error::new(io::ErrorKind::TimedOut, why)
    })
}

/// Names of files for the log.
#[must_use]
pub fn names(paths: &[impl AsRef<Path>]) -> String {
    let names = paths.iter().map(|path| path.as_ref().display().to_string());
    names.collect::<Vec<_>>().join(", ")
}

struct Running<T> {
    work: JoinHandle<T>,
    began: Instant,
    is_told: bool,
}

impl<T: Send + 'static> Running<T> {
    fn begin(work: impl FnOnce() -> T + Send + 'static) -> Self {
        Self {
            work: blocking::begin(work),
            began: Instant::now(),
            is_told: false,
        }
    }

    async fn within(&mut self, patience: Duration, files: &str) -> Result<T, ReadError> {
        if let Ok(ended) = tokio::time::timeout(patience, &mut self.work).await {
            if self.is_told {
                tracing::info!(files, "files can be read again");
            }
            return ended.map_err(|_panicked_or_cancelled| ReadError::Lost);
        }
        let is_stuck_now =
            self.began.elapsed() >= STUCK_AFTER && !std::mem::replace(&mut self.is_told, true);
        if is_stuck_now {
            tracing::error!(
                files,
                "files have not been read after 5 s: is their mount reachable? What was read last stays in use until they are"
            );
        }
        Err(ReadError::Pending { is_stuck_now })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::sync::mpsc::{Receiver, channel};

    use rustix::fs::{CWD, FileType as Kind, Mode, mknodat};

    use super::*;

    const NOT_YET: ReadError = ReadError::Pending {
        is_stuck_now: false,
    };
    const STUCK: ReadError = ReadError::Pending { is_stuck_now: true };

    #[test]
    fn only_regular_files_are_opened_and_none_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        mknodat(CWD, at("pipe"), Kind::Fifo, Mode::RUSR, 0).unwrap();
        let _listener = UnixListener::bind(at("socket")).unwrap();
        fs::write(at("file"), "text").unwrap();
        assert_eq!(
            io::read_to_string(open(&at("file")).unwrap()).unwrap(),
            "text"
        );
        for (path, words) in [
            (at("pipe"), "a named pipe"),
            (at("socket"), "a socket"),
            (folder.path().to_owned(), "a directory"),
            (PathBuf::from("/dev/null"), "a device"),
        ] {
            let error = open(&path).unwrap_err().to_string();
            assert!(
                error.contains(words) && error.contains("regular"),
                "{error}"
            );
        }
        let missing = open(&at("missing")).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn modes_tell_what_others_may_do() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("key");
        fs::write(&path, "").unwrap();
        let system = rustix::fs::statfs(&path).unwrap().f_type;
        let readable = (system != 0x0102_1994).then_some(OthersMay::Read);
        for (mode, expected) in [
            (0o600, None),
            (0o640, None),
            (0o644, readable),
            (0o620, Some(OthersMay::Write)),
            (0o602, Some(OthersMay::Write)),
            (0o666, Some(OthersMay::Write)),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(others_may(&path), expected, "{mode:o}");
        }
        // Kubernetes mounts secrets like this.
        if let Ok(shared) = tempfile::NamedTempFile::new_in("/dev/shm") {
            let permissions = fs::Permissions::from_mode(0o644);
            fs::set_permissions(shared.path(), permissions).unwrap();
            if rustix::fs::statfs(shared.path()).unwrap().f_type == 0x0102_1994 {
                assert_eq!(others_may(shared.path()), None);
            }
        }
    }

    #[test]
    fn work_before_the_runtime_has_a_deadline() {
        assert_eq!(within(Duration::from_secs(60), || 1).unwrap(), 1);
        let (work, go) = blocked(1);
        let error = within(Duration::ZERO, work).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(go);
    }

    /// A reading that blocks until it is let go.
    fn blocked(
        value: u8,
    ) -> (
        impl FnOnce() -> u8 + Send + 'static,
        std::sync::mpsc::Sender<()>,
    ) {
        let (go, held): (_, Receiver<()>) = channel();
        let work = move || {
            let _gone = held.recv();
            value
        };
        (work, go)
    }

    /// Limit (times): A file that cannot be read | is named in the log after 5 s; one thread waits for it
    #[tokio::test]
    async fn stuck_reading_is_reported_once_and_delivers_its_result_later() {
        let mut reader = Reader::new("file");
        let (work, go) = blocked(1);
        assert_eq!(reader.read(Duration::ZERO, work).await, Err(NOT_YET));
        // Another reading does not begin while one is under way.
        assert_eq!(reader.read(Duration::ZERO, || 2).await, Err(NOT_YET));
        if let Some(running) = &mut reader.running {
            running.began -= STUCK_AFTER;
        }
        assert_eq!(reader.read(Duration::ZERO, || 2).await, Err(STUCK));
        assert_eq!(reader.read(Duration::ZERO, || 2).await, Err(NOT_YET));
        assert!(reader.is_pending());
        drop(go);
        assert_eq!(reader.read(Duration::from_secs(60), || 2).await, Ok(1));
        assert_eq!(reader.read(Duration::from_secs(60), || 2).await, Ok(2));
        assert!(!reader.is_pending());
    }

    #[tokio::test]
    async fn dropped_call_leaves_the_reading_to_the_next_one() {
        let mut reader = Reader::new("file");
        let (work, go) = blocked(1);
        drop(tokio::time::timeout(Duration::ZERO, reader.read(STUCK_AFTER, work)).await);
        drop(go);
        assert_eq!(reader.read(Duration::from_secs(60), || 2).await, Ok(1));
    }

    #[tokio::test]
    async fn a_panic_is_lost_and_the_next_reading_begins() {
        let mut reader = Reader::new("file");
        let lost = reader.read(Duration::from_secs(60), || panic!("on purpose"));
        assert_eq!(lost.await, Err::<u8, _>(ReadError::Lost));
        assert_eq!(reader.read(Duration::from_secs(60), || 2).await, Ok(2));
    }
}
