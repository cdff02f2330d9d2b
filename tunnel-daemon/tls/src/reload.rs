//! TLS configurations that follow their files. New files are read and checked completely before they replace anything;
//! broken files leave the old configuration in place and are reported. New handshakes use the current configuration;
//! existing connections are not touched.

mod changes;

use std::{
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::AcqRel, Ordering::Acquire},
    },
    time::Duration,
};

use adit_host::files::{OthersMay, ReadError, Reader, STUCK_AFTER, others_may};
use arc_swap::ArcSwap;
use futures_util::future::join_all;
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

pub use self::changes::Changes;
use crate::inspect::Expiry;
use crate::reread::Reread;
#[cfg(test)]
use crate::tls::ServerSide;
use crate::tls::{ClientTls, ServerTls, TlsError, TlsFiles, TlsSpec};

/// How often files are read again without any notification: network file systems send none.
pub const POLL_PERIOD: Duration = Duration::from_secs(30);

/// The current TLS side of a listener.
pub type ReloadableServerTls = Reloadable<ServerTls>;
/// The current TLS side of a dialler.
pub type ReloadableClientTls = Reloadable<ClientTls>;

/// A configuration and the files it follows.
pub struct Reloadable<S: TlsSpec> {
    spec: S,
    current: ArcSwap<S::Config>,
    /// Contents that `current` was built from. Never locked while files are read, which may take for ever.
    loaded: Mutex<Loaded>,
    /// Held during a reload, so that two reloads cannot swap out of order.
    reloading: Mutex<()>,
    /// Told of each reload that replaced something.
    replaced: Notify,
    /// Number of such reloads.
    replacements: AtomicU64,
}

/// Contents of files that a configuration was built from.
struct Loaded {
    fingerprint: [u8; 32],
    expiries: Vec<Expiry>,
}

impl From<&TlsFiles> for Loaded {
    fn from(files: &TlsFiles) -> Self {
        Self {
            fingerprint: files.fingerprint(),
            expiries: files.expiries(),
        }
    }
}

/// What a reload did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reloaded {
    /// The files hold the configuration in use.
    Unchanged,
    /// The next handshake uses the new files.
    Replaced,
}

impl<S: TlsSpec> Reloadable<S> {
    /// Reads and checks the files for the first time. Blocks on file reads.
    ///
    /// # Errors
    /// The fault of the files; a start should fail on it.
    pub fn load(spec: S) -> Result<Arc<Self>, TlsError> {
        let (config, loaded) = build_settled(&spec, TlsFiles::read(&spec.paths())?)?;
        if let Some(key) = spec.key() {
            let file = key.display();
            match others_may(key) {
                Some(OthersMay::Write) => tracing::warn!(
                    %file,
                    "others than its owner may write a key file and so act as this program; run chmod go-w on it"
                ),
                Some(OthersMay::Read) => {
                    tracing::info!(%file, "all users of this host may read a key file; chmod o-r prevents it");
                }
                None => (),
            }
        }
        Ok(Arc::new(Self {
            spec,
            current: ArcSwap::from_pointee(config),
            loaded: Mutex::new(loaded),
            reloading: Mutex::new(()),
            replaced: Notify::new(),
            replacements: AtomicU64::new(0),
        }))
    }

    /// The configuration for the next handshake.
    #[must_use]
    pub fn current(&self) -> Arc<S::Config> {
        self.current.load_full()
    }

    /// Its specification.
    #[must_use]
    pub fn spec(&self) -> &S {
        &self.spec
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Reloadable<ClientTls> {
    /// Verifies a server's certificate against the files in use now, at the time `at` of its handshake: a certificate that has
    /// expired since is accepted. The chain begins with the server's own certificate.
    ///
    /// # Errors
    /// The certificate would be refused: it is on a revocation list, or no current CA has issued it.
    pub fn verify_server_again(
        &self,
        chain: &[CertificateDer<'static>],
        name: &ServerName<'_>,
        at: UnixTime,
    ) -> Result<(), rustls::Error> {
        let [own, intermediates @ ..] = chain else {
            return Ok(());
        };
        let servers = &self.current.load().servers;
        let verified = servers.verify_server_cert(own, intermediates, name, &[], at);
        verified.map(|_verified| ())
    }

    /// Number of times that other files came into use.
    #[must_use]
    pub fn replacements(&self) -> u64 {
        self.replacements.load(Acquire)
    }

    /// Waits until files in use refuse a server's certificate; see [`Self::verify_server_again`].
    pub async fn refuses_server(
        &self,
        chain: &[CertificateDer<'static>],
        name: &ServerName<'_>,
        at: UnixTime,
    ) -> rustls::Error {
        loop {
            let replaced = self.replaced.notified();
            if let Err(error) = self.verify_server_again(chain, name, at) {
                return error;
            }
            replaced.await;
        }
    }
}

impl Reloadable<ServerTls> {
    /// Verifies a client's certificate against the files in use now, at the time `at` of its handshake: a certificate that
    /// has expired since is accepted. The chain begins with the client's own certificate.
    ///
    /// # Errors
    /// The certificate would be refused: it is on a revocation list, or no current CA has issued it.
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
            // No certificate is asked for, or none was shown: other checks decide.
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

    /// Reads the files and, if they changed and are all usable, takes them into use. Blocks on file reads.
    ///
    /// # Errors
    /// A file is unusable; the old configuration stays in use.
    fn reload_now(&self) -> Result<Reloaded, TlsError>;

    /// When the certificates in use expire.
    fn expiries(&self) -> Vec<Expiry>;
}

impl<S: TlsSpec> Reload for Reloadable<S> {
    fn paths(&self) -> Vec<&Path> {
        self.spec.paths()
    }

    fn reload_now(&self) -> Result<Reloaded, TlsError> {
        let _alone = self
            .reloading
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let files = TlsFiles::read(&self.spec.paths())?;
        if self.loaded().fingerprint == files.fingerprint() {
            return Ok(Reloaded::Unchanged);
        }
        let (mut config, built_from) = build_settled(&self.spec, files)?;
        self.spec.inherit(&mut config, &self.current.load());
        self.current.store(Arc::new(config));
        // Written last, so it is still true after a panic in between.
        *self.loaded() = built_from;
        self.replacements.fetch_add(1, AcqRel);
        self.replaced.notify_waiters();
        Ok(Reloaded::Replaced)
    }

    fn expiries(&self) -> Vec<Expiry> {
        self.loaded().expiries.clone()
    }
}

/// Builds from `files`. If that fails and the files have changed since they were read, builds from their current content: a
/// swap between the reads of a certificate and its key looks like a mismatched pair.
fn build_settled<S: TlsSpec>(spec: &S, files: TlsFiles) -> Result<(S::Config, Loaded), TlsError> {
    match spec.build(&files) {
        Ok(config) => Ok((config, Loaded::from(&files))),
        Err(error) => {
            let again = TlsFiles::read(&spec.paths())?;
            if again.fingerprint() == files.fingerprint() {
                return Err(error);
            }
            Ok((spec.build(&again)?, Loaded::from(&again)))
        }
    }
}

/// Called once per change, not once per poll. `name` is the label given to [`watch`].
pub trait ReloadEvents: Send + Sync {
    /// New files are in use.
    fn loaded(&self, name: &'static str);
    /// Broken files hold the content in use again.
    fn restored(&self, name: &'static str);
    /// Files changed but cannot be used; the old configuration stays in use.
    fn failed(&self, name: &'static str, error: &TlsError);
    /// Files have not been read after [`STUCK_AFTER`]. The log names them.
    fn stuck(&self, name: &'static str);
    /// When the certificates in use expire: called at each check, not once per change.
    fn expiries(&self, expiries: &[Expiry]);
}

/// Follows the files of `targets` until `stop`. The directories are watched rather than the files, because files are
/// replaced by rename and, in Kubernetes, by a swapped symbolic link (`..data`) beside them. Where watching is not
/// possible, files are polled every `poll` (see [`POLL_PERIOD`]). `reread` triggers a check at once. Files that block delay
/// no other target. To be run as a service task.
pub async fn watch(
    targets: Vec<(&'static str, Arc<dyn Reload>)>,
    poll: Duration,
    events: Arc<dyn ReloadEvents>,
    reread: Reread,
    stop: CancellationToken,
) {
    let following = targets.into_iter().map(|(name, target)| {
        let followed = Followed {
            reader: Reader::of(&target.paths()),
            name,
            target,
            last_error: None,
        };
        followed.follow(poll, &*events, &reread)
    });
    let following = join_all(following);
    let _stopped = stop.run_until_cancelled(following).await;
    // Without files there is nothing to follow until then.
    stop.cancelled().await;
}

/// A target and whether its last check failed.
struct Followed {
    name: &'static str,
    target: Arc<dyn Reload>,
    reader: Reader<Result<Reloaded, TlsError>>,
    last_error: Option<String>,
}

impl Followed {
    async fn follow(mut self, poll: Duration, events: &dyn ReloadEvents, reread: &Reread) {
        let mut changes = Changes::of(&self.target.paths(), reread);
        // Checks once at the start: a change between loading and watching would go unnoticed otherwise.
        loop {
            self.check(events).await;
            events.expiries(&self.target.expiries());
            if !self.reader.is_pending() {
                changes.next(poll).await;
            }
        }
    }

    /// Waits for the files for [`STUCK_AFTER`] at most. If they take longer, the next check goes on waiting.
    async fn check(&mut self, events: &dyn ReloadEvents) {
        let target = Arc::clone(&self.target);
        let read = self.reader.read(STUCK_AFTER, move || target.reload_now());
        let outcome = match read.await {
            Ok(outcome) => outcome,
            Err(ReadError::Pending { is_stuck_now }) => {
                if is_stuck_now {
                    events.stuck(self.name);
                }
                return;
            }
            Err(error @ ReadError::Lost) => {
                let name = self.name;
                tracing::warn!(files = name, %error, "cannot look at the TLS files; the old ones stay in use");
                return;
            }
        };
        match outcome {
            Ok(Reloaded::Replaced) => {
                self.last_error = None;
                events.loaded(self.name);
            }
            Ok(Reloaded::Unchanged) => {
                if self.last_error.take().is_some() {
                    events.restored(self.name);
                }
            }
            Err(error) => {
                let text = error.to_string();
                if self.last_error.as_ref() != Some(&text) {
                    events.failed(self.name, &error);
                    self.last_error = Some(text);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
