//! Limits shared by the clients of all frontends.

use std::future::poll_fn;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Instant;

use adit_core::grant::{ClientRules, ClientTargets};
use bytes::BytesMut;
use tokio::io::AsyncRead;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use adit_config::limits::{UNANSWERED_BYTES_FREE, UNANSWERED_BYTES_MAX};
use adit_telemetry::rate::TokenBucket;
use adit_tls::blocks;
use adit_tls::principal::Principal;

/// Logged refusals per second on average, and at once: any client can cause them.
const LOGGED_PER_SECOND: u32 = 5;
const LOGGED_BURST: u32 = 50;
/// Calls of gRPC clients that wait to be told that there is no room; further ones are reset.
const REFUSED_CALLS_MAX: usize = 1_024;

/// Shared by all frontends of a server.
#[derive(Debug)]
pub struct ClientLimits {
    logged: Mutex<TokenBucket>,
    /// Bytes counted by all [`Unanswered`].
    unanswered: AtomicUsize,
    refused_calls: Arc<Semaphore>,
    rules: ClientRules,
}

impl Default for ClientLimits {
    fn default() -> Self {
        Self::new(ClientRules::default())
    }
}

impl ClientLimits {
    /// `rules` say which targets clients may ask for.
    #[must_use]
    pub fn new(rules: ClientRules) -> Self {
        let logged = TokenBucket::new(LOGGED_PER_SECOND, LOGGED_BURST, Instant::now());
        Self {
            logged: Mutex::new(logged),
            unanswered: AtomicUsize::new(0),
            refused_calls: Arc::new(Semaphore::new(REFUSED_CALLS_MAX)),
            rules,
        }
    }

    /// Targets that a client with this certificate, or without one, may ask for; `None`: all.
    pub(super) fn targets_of(&self, client: Option<&Principal>) -> Option<Arc<ClientTargets>> {
        self.rules.of_client(client.map(Principal::names))
    }

    /// Targets for which a server with this certificate may forward dials; `None`: all.
    pub(super) fn targets_of_peer(&self, peer: &Principal) -> Option<Arc<ClientTargets>> {
        self.rules.of_peer(peer.names())
    }

    /// A place for a call that is refused in its own terms.
    pub(super) fn refused_call(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.refused_calls).try_acquire_owned().ok()
    }

    /// Whether to log one more refusal.
    pub fn may_log_refusal(&self) -> bool {
        self.may_log_at(Instant::now())
    }

    fn may_log_at(&self, now: Instant) -> bool {
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        logged.try_take(now)
    }
}

/// What one client has sent before its tunnel is open: the request head, and bytes behind it. Memory beyond a free part is
/// counted in a sum over all clients, since connections are many and their clients unknown. Dropping this subtracts it.
#[derive(Debug)]
pub(super) struct Unanswered {
    limits: Arc<ClientLimits>,
    counted: usize,
}

impl Unanswered {
    pub(super) fn new(limits: &Arc<ClientLimits>) -> Self {
        Self {
            limits: Arc::clone(limits),
            counted: 0,
        }
    }

    /// Reads once and appends the bytes. `None`: this client has used its free part, and the sum of all clients is at its
    /// limit.
    ///
    /// # Errors
    /// The stream's error.
    pub(super) async fn append<S: AsyncRead + Unpin>(
        &mut self,
        io: &mut S,
        bytes: &mut BytesMut,
    ) -> io::Result<Option<usize>> {
        poll_fn(|cx| {
            let most = self.room(bytes.len());
            if most == 0 {
                return Poll::Ready(Ok(None));
            }
            let read = blocks::poll_append(cx, io, bytes, most)?;
            self.count(bytes.capacity());
            read.map(|read| Ok(Some(read)))
        })
        .await
    }

    /// Like [`Self::append`], but waits when there is no room. It is not woken when room appears, so the caller must also wait
    /// for something else.
    ///
    /// # Errors
    /// The stream's error.
    pub(super) async fn append_or_wait<S: AsyncRead + Unpin>(
        &mut self,
        io: &mut S,
        bytes: &mut BytesMut,
    ) -> io::Result<usize> {
        match self.append(io, bytes).await? {
            Some(read) => Ok(read),
            None => std::future::pending().await,
        }
    }

    /// How many bytes may be read now, with `held` bytes held.
    fn room(&self, held: usize) -> usize {
        if self.limits.unanswered.load(Relaxed) < UNANSWERED_BYTES_MAX {
            usize::MAX
        } else {
            UNANSWERED_BYTES_FREE.saturating_sub(held)
        }
    }

    /// Counts `bytes` of memory held now. A read that exceeds the limit is counted all the same: its memory is in use.
    pub(super) fn count(&mut self, bytes: usize) {
        let counted = bytes.saturating_sub(UNANSWERED_BYTES_FREE);
        let sum = &self.limits.unanswered;
        if counted >= self.counted {
            sum.fetch_add(counted - self.counted, Relaxed);
        } else {
            sum.fetch_sub(self.counted - counted, Relaxed);
        }
        self.counted = counted;
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.limits.unanswered.fetch_sub(self.counted, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// Limit (operations): Log lines about refused gRPC calls and SOCKS5 requests | 5 per second, 50 at once
    #[test]
    fn refusal_logs_are_limited_to_five_a_second() {
        let limits = ClientLimits::default();
        let start = Instant::now() + Duration::from_secs(1);
        let logged = |now| (0..1000).filter(|_| limits.may_log_at(now)).count();
        assert_eq!(logged(start), 50);
        assert_eq!(logged(start + Duration::from_secs(1)), 5);
    }

    /// Limit (memory): Early bytes of `http-connect`, `socks5` and captured clients before their tunnels open | 16 KiB each, and
    /// 64 MiB beyond that in total. Then heads get status 431 and other bytes stay unread
    #[test]
    fn unanswered_clients_share_64_mebibytes_beyond_16_kibibytes_each() {
        let limits = Arc::new(ClientLimits::default());
        let [mut much, mut little] = [(); 2].map(|()| Unanswered::new(&limits));
        little.count(UNANSWERED_BYTES_FREE);
        much.count(UNANSWERED_BYTES_FREE + UNANSWERED_BYTES_MAX - 1);
        assert_eq!(little.room(UNANSWERED_BYTES_FREE), usize::MAX);
        much.count(UNANSWERED_BYTES_FREE + UNANSWERED_BYTES_MAX);
        assert_eq!(little.room(UNANSWERED_BYTES_FREE), 0);
        assert_eq!(little.room(1000), UNANSWERED_BYTES_FREE - 1000);
        much.count(0);
        assert_eq!(little.room(UNANSWERED_BYTES_FREE), usize::MAX);
        little.count(UNANSWERED_BYTES_FREE + 5);
        drop((much, little));
        assert_eq!(limits.unanswered.load(Relaxed), 0);
    }
}
