//! TLS sessions that clients may resume, each until a certificate that its client showed expires.
//!
//! rustls resumes a session without checking its certificates again, and gives new tickets each time: the holder of an
//! expired certificate could come back for ever. Here such a session is not found, so the client makes a full handshake,
//! which verifies its certificate. Sessions of other clients are not touched.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use rustls::server::StoresServerSessions;
use rustls::time_provider::TimeProvider;
use rustls_pki_types::CertificateDer;

/// The sessions of a listener as one handshake sees them. A stored value begins with the last second since 1970 in which it
/// is valid, 8 bytes, big endian. New sessions wait for [`Self::keep`], since the certificates are known only then.
pub(super) struct SessionsOfHandshake {
    all: Arc<dyn StoresServerSessions>,
    clock: Arc<dyn TimeProvider>,
    new: Mutex<Vec<(Vec<u8>, Vec<u8>)>>,
}

impl SessionsOfHandshake {
    /// Of a listener whose sessions are `all`.
    pub(super) fn new(all: Arc<dyn StoresServerSessions>, clock: Arc<dyn TimeProvider>) -> Self {
        Self {
            all,
            clock,
            new: Mutex::default(),
        }
    }

    /// Lets the client resume the sessions of this handshake, until the first certificate of `shown` expires.
    pub(super) fn keep(&self, shown: &[CertificateDer<'_>]) {
        let until = shown.iter().map(|der| expires_at(der)).min();
        let until = until.unwrap_or(u64::MAX).to_be_bytes();
        let mut new = self.new.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, session) in new.drain(..) {
            // A full store drops an older session.
            self.all.put(key, [&until[..], &session].concat());
        }
    }

    /// The session of a stored value, unless a certificate of its client has expired.
    fn current(&self, mut stored: Vec<u8>) -> Option<Vec<u8>> {
        let until = u64::from_be_bytes(*stored.first_chunk()?);
        let session = stored.split_off(size_of_val(&until));
        (until >= self.clock.current_time()?.as_secs()).then_some(session)
    }
}

/// The last second in which a certificate is valid; 0 if it cannot be read, so that its sessions are not resumed.
fn expires_at(der: &[u8]) -> u64 {
    x509_parser::parse_x509_certificate(der).map_or(0, |(_rest, certificate)| {
        let last = certificate.validity().not_after.timestamp();
        u64::try_from(last).unwrap_or(0)
    })
}

impl StoresServerSessions for SessionsOfHandshake {
    fn put(&self, key: Vec<u8>, session: Vec<u8>) -> bool {
        let mut new = self.new.lock().unwrap_or_else(PoisonError::into_inner);
        new.push((key, session));
        true
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.current(self.all.get(key)?)
    }

    fn take(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.current(self.all.take(key)?)
    }

    fn can_cache(&self) -> bool {
        self.all.can_cache()
    }
}

impl fmt::Debug for SessionsOfHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SessionsOfHandshake")
            .finish_non_exhaustive()
    }
}
