//! A file that permits or denies: read whole at the start, and again whenever it changes. What cannot be used changes nothing
//! and is counted.

use std::fmt::Display;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use adit_host::files::{ReadError, Reader, STUCK_AFTER};
use arc_swap::{ArcSwap, Guard};

use adit_telemetry::families::Counters;
use adit_telemetry::labels::ReloadResult;
use adit_tls::reload::Changes;
use adit_tls::reread::Reread;

/// How often a file is read where changes cannot be watched.
pub(crate) const POLL: Duration = Duration::from_secs(30);
/// Size limit of a file.
const BYTES_MAX: u64 = 4 << 20;

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{flag} {path}: {cause}", path = .path.display())]
pub struct FileError {
    flag: &'static str,
    path: PathBuf,
    cause: Cause,
}

#[derive(Debug, thiserror::Error)]
enum Cause {
    #[error("it has more than {} MiB; {remedy}", BYTES_MAX >> 20)]
    TooLong { remedy: &'static str },
    #[error("{0}")]
    Unreadable(std::io::Error),
    #[error("{0}")]
    Wrong(String),
}

/// What a file holds.
pub(crate) trait Content: Sized + PartialEq + Send + Sync + 'static {
    /// Why a text is no such content.
    type Error: Display;
    /// The flag that names the file.
    const FLAG: &'static str;
    /// What the log calls it.
    const NAME: &'static str;
    /// What to do about a file that is too long.
    const IF_TOO_LONG: &'static str;

    /// Reads the text.
    ///
    /// # Errors
    /// What is wrong, and where.
    fn parse(text: &str) -> Result<Self, Self::Error>;
}

/// A file and the content in force. Clones share it.
#[derive(Debug)]
pub(crate) struct Followed<T>(Arc<(PathBuf, ArcSwap<T>)>);

impl<T> Clone for Followed<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: Content> Followed<T> {
    /// Reads the file.
    ///
    /// # Errors
    /// It cannot be used.
    pub(crate) fn load(path: &Path) -> Result<Self, FileError> {
        let content = read(path)?;
        Ok(Self(Arc::new((
            path.to_owned(),
            ArcSwap::from_pointee(content),
        ))))
    }

    pub(crate) fn content(&self) -> Guard<Arc<T>> {
        self.0.1.load()
    }

    /// Follows the file, and calls `changed` when it has new content. Never ends.
    pub(crate) async fn follow(
        &self,
        reloads: &Counters<ReloadResult>,
        reread: &Reread,
        changed: impl Fn(),
    ) {
        let path = &self.0.0;
        let mut changes = Changes::of(&[path], reread);
        let mut reader = Reader::of(&[path]);
        let mut told = None;
        loop {
            let reading = path.clone();
            match reader.read(STUCK_AFTER, move || read(&reading)).await {
                Ok(outcome) => self.take(outcome, &mut told, reloads, &changed),
                Err(ReadError::Pending { is_stuck_now }) => {
                    if is_stuck_now {
                        reloads.count(ReloadResult::Failed);
                    }
                    continue;
                }
                Err(error @ ReadError::Lost) => {
                    tracing::warn!(%error, file = %path.display(), "cannot look at the {}; the last one stays in force", T::NAME);
                }
            }
            changes.next(POLL).await;
        }
    }

    /// Takes content that was read into force, if it differs.
    fn take(
        &self,
        outcome: Result<T, FileError>,
        told: &mut Option<String>,
        reloads: &Counters<ReloadResult>,
        changed: &impl Fn(),
    ) {
        match outcome {
            Ok(content) => {
                let was_unusable = told.take().is_some();
                let is_new = **self.content() != content;
                if is_new {
                    self.0.1.store(Arc::new(content));
                    changed();
                    tracing::info!(file = %self.0.0.display(), "the new {} is in force", T::NAME);
                }
                if is_new || was_unusable {
                    reloads.count(ReloadResult::Ok);
                }
            }
            Err(error) => {
                let text = error.to_string();
                if told.as_ref() != Some(&text) {
                    tracing::error!(%error, "the new {} cannot be used; the last one stays in force", T::NAME);
                    reloads.count(ReloadResult::Failed);
                    *told = Some(text);
                }
            }
        }
    }
}

/// Reads a file once.
///
/// # Errors
/// It cannot be used.
pub(crate) fn read<T: Content>(path: &Path) -> Result<T, FileError> {
    let wrong = |cause| FileError {
        flag: T::FLAG,
        path: path.to_owned(),
        cause,
    };
    let mut text = String::new();
    let read = adit_host::files::open(path)
        .and_then(|file| file.take(BYTES_MAX + 1).read_to_string(&mut text));
    match read {
        Err(cause) => Err(wrong(Cause::Unreadable(cause))),
        Ok(bytes) if u64::try_from(bytes).is_ok_and(|bytes| bytes > BYTES_MAX) => {
            Err(wrong(Cause::TooLong {
                remedy: T::IF_TOO_LONG,
            }))
        }
        Ok(_bytes) => T::parse(&text).map_err(|flaw| wrong(Cause::Wrong(flaw.to_string()))),
    }
}
