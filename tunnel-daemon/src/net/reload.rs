//! TLS configurations that follow their files. New files are read and checked completely before they replace anything;
//! broken ones leave the old configuration in place and are reported. Whoever starts a handshake takes what is current;
//! connections that exist are not touched.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use notify::{
    Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher,
    event::{AccessKind, AccessMode, ModifyKind},
};
use rustls_pki_types::{CertificateDer, UnixTime};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::reread::Reread;
#[cfg(test)]
use super::tls::ServerSide;
use super::tls::{ClientTls, ServerTls, TlsError, TlsFiles, TlsSpec};

/// How often files are read again without any notification: network file systems send none.
pub const POLL_PERIOD: Duration = Duration::from_secs(30);
/// Wait after the first notification, so that a certificate and its key, written one after the other, are read as a
/// pair. A mismatch read in between would only be reported, never used.
const SETTLE: Duration = Duration::from_millis(100);

/// The TLS side of a listener, current.
pub type ReloadableServerTls = Reloadable<ServerTls>;
/// The TLS side of whoever connects, current.
pub type ReloadableClientTls = Reloadable<ClientTls>;

/// A configuration and the files it follows.
pub struct Reloadable<S: TlsSpec> {
    spec: S,
    current: ArcSwap<S::Config>,
    /// Which contents `current` was built from. Held during a reload, so that two cannot swap out of order.
    loaded: Mutex<[u8; 32]>,
}

/// What a reload did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reloaded {
    /// The files hold what is in use already.
    Unchanged,
    /// The next handshake uses the new files.
    Replaced,
}

impl<S: TlsSpec> Reloadable<S> {
    /// Reads and checks the files for the first time. Blocks on file reads.
    ///
    /// # Errors
    /// Whatever is wrong with the files; a start should fail on it.
    pub fn load(spec: S) -> Result<Arc<Self>, TlsError> {
        let (config, fingerprint) = build_settled(&spec, TlsFiles::read(&spec.paths())?)?;
        Ok(Arc::new(Self {
            spec,
            current: ArcSwap::from_pointee(config),
            loaded: Mutex::new(fingerprint),
        }))
    }

    /// What the next handshake should use.
    #[must_use]
    pub fn current(&self) -> Arc<S::Config> {
        self.current.load_full()
    }

    /// What was configured.
    #[must_use]
    pub fn spec(&self) -> &S {
        &self.spec
    }
}

impl Reloadable<ServerTls> {
    /// Verifies a client's certificate by the files in use now and the time of its handshake: a certificate that has expired since
    /// is accepted. The chain begins with the client's own certificate.
    ///
    /// # Errors
    /// It would be refused: it is on a revocation list, or no CA of these vouches for it.
    pub fn verify_client_again(
        &self,
        chain: &[CertificateDer<'static>],
        at: UnixTime,
    ) -> Result<(), rustls::Error> {
        let current = self.current.load();
        match (&current.clients, chain) {
            (Some(verifier), [own, intermediates @ ..]) => verifier
                .verify_client_cert(own, intermediates, at)
                .map(|_verified| ()),
            // None is asked for, or none was shown: others decide.
            _ => Ok(()),
        }
    }

    /// Puts another clock in place of the system's. A reload at the same moment is not lost.
    #[cfg(test)]
    pub(super) fn set_clock(&self, clock: &Arc<dyn rustls::time_provider::TimeProvider>) {
        let _before = self.current.rcu(|side| {
            let mut config = Arc::clone(&side.config);
            Arc::make_mut(&mut config).time_provider = Arc::clone(clock);
            ServerSide {
                config,
                clients: side.clients.clone(),
                trust: side.trust,
            }
        });
    }
}

/// What [`watch`] needs of a [`Reloadable`], of either side.
pub trait Reload: Send + Sync + 'static {
    /// The files to watch.
    fn paths(&self) -> Vec<&Path>;

    /// Reads the files and, if they changed and are all good, puts them into use. Blocks on file reads.
    ///
    /// # Errors
    /// Something is wrong with the files; what was in use stays in use.
    fn reload_now(&self) -> Result<Reloaded, TlsError>;
}

impl<S: TlsSpec> Reload for Reloadable<S> {
    fn paths(&self) -> Vec<&Path> {
        self.spec.paths()
    }

    fn reload_now(&self) -> Result<Reloaded, TlsError> {
        // The fingerprint is written last, so a panic in between left it true.
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        let files = TlsFiles::read(&self.spec.paths())?;
        if *loaded == files.fingerprint() {
            return Ok(Reloaded::Unchanged);
        }
        let (mut config, fingerprint) = build_settled(&self.spec, files)?;
        self.spec.inherit(&mut config, &self.current.load());
        self.current.store(Arc::new(config));
        *loaded = fingerprint;
        Ok(Reloaded::Replaced)
    }
}

/// Builds from `files`; if that fails and the files have changed since they were read, once more from what they hold
/// now: a swap between the reads of a certificate and its key looks like a pair that does not match.
fn build_settled<S: TlsSpec>(spec: &S, files: TlsFiles) -> Result<(S::Config, [u8; 32]), TlsError> {
    let fingerprint = files.fingerprint();
    match spec.build(&files) {
        Ok(config) => Ok((config, fingerprint)),
        Err(error) => {
            let again = TlsFiles::read(&spec.paths())?;
            if again.fingerprint() == fingerprint {
                return Err(error);
            }
            Ok((spec.build(&again)?, again.fingerprint()))
        }
    }
}

/// Told once per change, not once per poll. `name` is the label given to [`watch`].
pub trait ReloadEvents: Send + Sync {
    /// New files are in use, or broken ones were put right without a change.
    fn loaded(&self, name: &'static str);
    /// Files changed but cannot be used; the old ones stay in use.
    fn failed(&self, name: &'static str, error: &TlsError);
}

/// Follows the files of `targets` until `stop`. The directories are watched rather than the files, because files are
/// replaced by rename and, in Kubernetes, by a swapped symbolic link (`..data`) beside them. Where watching is not
/// possible, polling every `poll` (see [`POLL_PERIOD`]) remains. `reread` asks for a look at once. To be run as a service task.
pub async fn watch(
    targets: Vec<(&'static str, Arc<dyn Reload>)>,
    poll: Duration,
    events: Arc<dyn ReloadEvents>,
    reread: Reread,
    stop: CancellationToken,
) {
    let paths: Vec<&Path> = targets
        .iter()
        .flat_map(|(_name, target)| target.paths())
        .collect();
    let changes = Changes::of(&paths, &reread);
    let mut followed: Vec<Followed> = targets
        .into_iter()
        .map(|(name, target)| Followed {
            name,
            target,
            last_error: None,
        })
        .collect();
    // Once at the start: a change between loading and watching would go unnoticed otherwise.
    loop {
        for target in &mut followed {
            target.check(&*events).await;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = changes.next(poll) => (),
        }
    }
}

/// Files that may change, by the directories they are in.
pub struct Changes {
    changed: Arc<Notify>,
    /// Dropping it ends the notifications.
    _watcher: Option<RecommendedWatcher>,
}

impl Changes {
    /// Watches from now on. What `reread` asks for is told as a change.
    #[must_use]
    pub fn of(paths: &[impl AsRef<Path>], reread: &Reread) -> Self {
        let changed = Arc::new(Notify::new());
        reread.tell(&changed);
        let names = paths
            .iter()
            .flat_map(|path| names_of(path.as_ref()))
            .collect();
        let _watcher = watch_directories(names, Arc::clone(&changed));
        Self { changed, _watcher }
    }

    /// Waits until one may have changed and what was begun is likely written, or for `poll`. A cancelled call loses no change
    /// but the one it was waiting out.
    pub async fn next(&self, poll: Duration) {
        tokio::select! {
            () = tokio::time::sleep(poll) => (),
            () = self.changed.notified() => tokio::time::sleep(SETTLE).await,
        }
    }
}

/// A target and whether its last check failed.
struct Followed {
    name: &'static str,
    target: Arc<dyn Reload>,
    last_error: Option<String>,
}

impl Followed {
    async fn check(&mut self, events: &dyn ReloadEvents) {
        let target = Arc::clone(&self.target);
        let outcome = match tokio::task::spawn_blocking(move || target.reload_now()).await {
            Ok(outcome) => outcome,
            // The runtime shuts down, or the parser panicked and said so: the old files stay in use.
            Err(_join_error) => return,
        };
        match outcome {
            Ok(Reloaded::Replaced) => {
                self.last_error = None;
                tracing::info!(tls = self.name, "TLS files reloaded");
                events.loaded(self.name);
            }
            Ok(Reloaded::Unchanged) => {
                if self.last_error.take().is_some() {
                    tracing::info!(tls = self.name, "TLS files are as they were when loaded");
                    events.loaded(self.name);
                }
            }
            Err(error) => {
                let text = error.to_string();
                if self.last_error.as_ref() != Some(&text) {
                    tracing::warn!(
                        tls = self.name,
                        error = text,
                        "TLS files changed but cannot be used; the old ones stay in use"
                    );
                    events.failed(self.name, &error);
                    self.last_error = Some(text);
                }
            }
        }
    }
}

/// The names under which a change of `path` is told: its own, and that of what its links lead to now.
fn names_of(path: &Path) -> Vec<PathBuf> {
    let own = match path.parent() {
        // As the events name it whose directory is watched as `.`.
        Some(parent) if parent.as_os_str().is_empty() => Path::new(".").join(path),
        _ => path.to_owned(),
    };
    let real = path.canonicalize().ok();
    std::iter::once(own).chain(real).collect()
}

/// Whether the files may be others now. Opening and reading are no change: reacting to our own reads would never end.
/// Nor is what happens inside another file of the directory, such as a log; a link or a name that comes, goes or moves may be.
fn is_change(event: &Event, names: &BTreeSet<PathBuf>) -> bool {
    let inside_a_file = match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write))
        | EventKind::Modify(ModifyKind::Data(_) | ModifyKind::Metadata(_)) => true,
        EventKind::Access(_) => return false,
        _ => false,
    };
    !inside_a_file || event.paths.is_empty() || event.paths.iter().any(|path| names.contains(path))
}

fn watch_directories(names: BTreeSet<PathBuf>, changed: Arc<Notify>) -> Option<RecommendedWatcher> {
    let directories: BTreeSet<PathBuf> = names
        .iter()
        .filter_map(|name| name.parent())
        .map(Path::to_owned)
        .collect();
    let notice = move |event: notify::Result<Event>| {
        // An error, such as a lost event, is a reason to look, too.
        if event.map_or(true, |event| is_change(&event, &names)) {
            changed.notify_one();
        }
    };
    let mut watcher = match notify::recommended_watcher(notice) {
        Ok(watcher) => watcher,
        Err(error) => {
            tracing::warn!(%error, "cannot watch files for changes; they are polled");
            return None;
        }
    };
    for directory in directories {
        if let Err(error) = watcher.watch(&directory, RecursiveMode::NonRecursive) {
            tracing::warn!(%error, directory = %directory.display(), "cannot watch a directory for changes; it is polled");
        }
    }
    Some(watcher)
}

#[cfg(test)]
mod tests;
