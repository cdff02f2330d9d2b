//! Decides whether a caller on the agent port is an agent: by certificate, by token, or by both.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use adit_kube::review_policy::ReviewError;
use adit_kube::reviewer::{self, Reviewer};
use adit_kube::token::Token;
use http::{HeaderMap, header};

use adit_config::plan::AgentProof;
use adit_net::grpc::Code;
use adit_telemetry::labels::AgentRefusal;
use adit_telemetry::rate::TokenBucket;
use adit_tls::agent_identity::{AgentIdentity, Certificate};
use adit_tls::stream::PeerAddr;

/// Logged refusals of unauthenticated callers: per second on average, and at once. All others are only counted.
const LOGGED_PER_SECOND: u32 = 5;
const LOGGED_BURST: u32 = 50;

/// Metadata of one caller that may always wait for a review: enough for usual agents.
const SMALL_BYTES: usize = 4 * 1024;
/// Metadata of all other waiting callers together: an unauthenticated caller may send 256 KiB.
const LARGE_BYTES_MAX: usize = 16 << 20;

/// Decides who may link.
pub struct AgentAuthenticator {
    tokens: Option<(Reviewer, AgentProof)>,
    large: LargeCallers,
    addresses: AdmittedAddresses,
    logged: Mutex<TokenBucket>,
}

/// Why a call is refused, as its agent is told.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) reason: AgentRefusal,
    pub(super) code: Code,
    pub(super) text: String,
    /// What the log says instead, where `text` keeps something from the caller.
    pub(super) logged: Option<String>,
}

impl Refused {
    pub(super) fn new(reason: AgentRefusal, code: Code, text: impl Into<String>) -> Self {
        Self {
            reason,
            code,
            text: text.into(),
            logged: None,
        }
    }
}

impl AgentAuthenticator {
    /// Without `tokens`, certificates alone decide.
    #[must_use]
    pub fn new(tokens: Option<(Reviewer, AgentProof)>) -> Self {
        Self {
            tokens,
            large: LargeCallers::default(),
            addresses: AdmittedAddresses::default(),
            logged: Mutex::new(TokenBucket::new(
                LOGGED_PER_SECOND,
                LOGGED_BURST,
                Instant::now(),
            )),
        }
    }

    /// Addresses from which agents with links connect.
    pub(super) fn addresses(&self) -> &AdmittedAddresses {
        &self.addresses
    }

    /// Whether to log one more refusal of an unauthenticated caller.
    pub(super) fn may_log(&self) -> bool {
        locked(&self.logged).try_take(Instant::now())
    }

    /// The token to review; `None`: the certificate suffices. The review does not need the headers.
    ///
    /// # Errors
    /// A token is needed and missing; in upstream's words.
    pub(super) fn token(
        &self,
        headers: &HeaderMap,
        certificate: Option<&Certificate>,
    ) -> Result<Option<Token>, Refused> {
        let Some((_reviewer, proof)) = &self.tokens else {
            return Ok(None);
        };
        let shows_token = headers.contains_key(header::AUTHORIZATION);
        if *proof == AgentProof::Either && certificate.is_some() && !shows_token {
            return Ok(None);
        }
        bearer(headers).map(Some).map_err(|text| Refused {
            reason: AgentRefusal::Token,
            code: Code::Unknown,
            text,
            logged: None,
        })
    }

    /// Reserves memory for a caller's metadata, which is kept until its token is reviewed.
    ///
    /// # Errors
    /// The metadata is large, and so is that of other waiting callers.
    pub(super) fn room(&self, headers: &HeaderMap) -> Result<Option<LargeCaller>, Refused> {
        let lengths = headers
            .iter()
            .map(|(name, value)| name.as_str().len() + value.len());
        let bytes = lengths.sum();
        if bytes <= SMALL_BYTES {
            return Ok(None);
        }
        self.large.enter(bytes).map(Some).ok_or_else(|| {
            Refused::new(
                AgentRefusal::NotReviewed,
                Code::ResourceExhausted,
                "too many agents with much metadata wait for a review of their tokens".to_owned(),
            )
        })
    }

    /// Identifies the caller. `certificate` was proved by its TLS session. A cancelled call has no effect.
    ///
    /// # Errors
    /// The caller may not link; in upstream's words.
    pub(super) async fn identify(
        &self,
        token: Option<Token>,
        certificate: Option<Certificate>,
        peer: PeerAddr,
    ) -> Result<AgentIdentity, Refused> {
        let (Some((reviewer, _proof)), Some(token)) = (&self.tokens, token) else {
            return Ok(AgentIdentity::of_certificate(certificate));
        };
        let caller = reviewer::Caller {
            address: peer.counted_ip(),
            is_trusted: self.addresses.has(peer),
        };
        match reviewer.review(&token, caller).await {
            Ok(account) => Ok(AgentIdentity::of_account(account, certificate)),
            Err(error) => Err(Refused {
                reason: if error.is_denial() {
                    AgentRefusal::Token
                } else {
                    AgentRefusal::NotReviewed
                },
                code: match error {
                    ReviewError::Overload => Code::ResourceExhausted,
                    _ => Code::Unknown,
                },
                text: not_validated(error.told()),
                logged: Some(not_validated(error.to_string())),
            }),
        }
    }
}

/// In upstream's words.
fn not_validated(why: impl std::fmt::Display) -> String {
    format!("Failed to validate authentication token, err:{why}")
}

/// The token of a call.
///
/// # Errors
/// There is not exactly one token; in upstream's words.
fn bearer(headers: &HeaderMap) -> Result<Token, String> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let value = values
        .next()
        .ok_or("Authentication context was not found in metadata")?;
    let others = values.count();
    if others > 0 {
        return Err(format!("too many ({}) tokens are received", others + 1));
    }
    let text = value.to_str().unwrap_or_default();
    text.strip_prefix("Bearer ")
        .map(Token::new)
        .ok_or_else(|| "received token does not have \"Bearer \" prefix".to_owned())
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while these are held; if it did, the state is still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes of callers with large metadata. Clones share the count.
#[derive(Clone, Default)]
struct LargeCallers(Arc<AtomicUsize>);

/// One such caller; dropping it releases its bytes.
pub(super) struct LargeCaller {
    all: LargeCallers,
    bytes: usize,
}

impl LargeCallers {
    fn enter(&self, bytes: usize) -> Option<LargeCaller> {
        let more = |held: usize| Some(held + bytes).filter(|held| *held <= LARGE_BYTES_MAX);
        self.0.fetch_update(Relaxed, Relaxed, more).ok()?;
        Some(LargeCaller {
            all: self.clone(),
            bytes,
        })
    }
}

impl Drop for LargeCaller {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.bytes, Relaxed);
    }
}

/// Number of links from each address. Clones share the counts.
#[derive(Clone, Default)]
pub(super) struct AdmittedAddresses(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// Counts a link from an address until dropped.
pub(super) struct AdmittedAddress {
    addresses: AdmittedAddresses,
    address: Option<IpAddr>,
}

impl AdmittedAddresses {
    /// Whether an agent with a link connects from this address.
    pub(super) fn has(&self, peer: PeerAddr) -> bool {
        peer.counted_ip()
            .is_some_and(|address| locked(&self.0).contains_key(&address))
    }

    /// Counts one more link from this address.
    pub(super) fn enter(&self, peer: PeerAddr) -> AdmittedAddress {
        let address = peer.counted_ip();
        if let Some(address) = address {
            *locked(&self.0).entry(address).or_default() += 1;
        }
        AdmittedAddress {
            addresses: self.clone(),
            address,
        }
    }
}

impl Drop for AdmittedAddress {
    fn drop(&mut self) {
        let Some(address) = self.address else { return };
        let mut addresses = locked(&self.addresses.0);
        if let Some(links) = addresses.get_mut(&address) {
            *links -= 1;
            if *links == 0 {
                addresses.remove(&address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn a_call_has_exactly_one_bearer_token() {
        let with = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                let value = HeaderValue::from_bytes(value.as_bytes()).unwrap();
                headers.append(header::AUTHORIZATION, value);
            }
            bearer(&headers).map(|_token| ())
        };
        assert_eq!(with(&["Bearer a.b.c"]), Ok(()));
        for (values, text) in [
            (&[][..], "Authentication context was not found in metadata"),
            (
                &["Bearer a", "Bearer b"],
                "too many (2) tokens are received",
            ),
            (
                &["bearer a"],
                "received token does not have \"Bearer \" prefix",
            ),
            (
                &["Bearer"],
                "received token does not have \"Bearer \" prefix",
            ),
            (
                &["Basic a"],
                "received token does not have \"Bearer \" prefix",
            ),
            (
                &["\u{e9}"],
                "received token does not have \"Bearer \" prefix",
            ),
        ] {
            assert_eq!(with(values), Err(text.to_owned()), "{values:?}");
        }
    }

    /// Limit (memory): Metadata of callers whose tokens are under review | 4 KiB each, and 16 MiB beyond that per
    /// process
    #[test]
    fn only_large_metadata_of_waiting_callers_uses_the_budget() {
        let admission = AgentAuthenticator::new(None);
        let saying = |bytes| {
            let mut headers = HeaderMap::new();
            let value = HeaderValue::from_bytes(&vec![b'a'; bytes]).unwrap();
            headers.insert("agentidentifiers", value);
            headers
        };
        let most: Vec<_> = (0..LARGE_BYTES_MAX / (256 << 10))
            .map(|_| admission.room(&saying((256 << 10) - 16)).unwrap())
            .collect();
        let refused = admission.room(&saying(SMALL_BYTES)).err().unwrap();
        assert_eq!(refused.code, Code::ResourceExhausted);
        assert!(admission.room(&saying(1000)).unwrap().is_none());
        drop(most);
        assert!(admission.room(&saying(SMALL_BYTES)).unwrap().is_some());
    }

    /// Limit (memory): Addresses known to have a link | one per link, removed with it
    #[test]
    fn an_address_is_admitted_while_it_has_a_link() {
        let addresses = AdmittedAddresses::default();
        let at = |port| PeerAddr::Tcp(([10, 0, 0, 1], port).into());
        let links = [addresses.enter(at(1)), addresses.enter(at(2))];
        assert!(addresses.has(at(3)) && !addresses.has(PeerAddr::Unix));
        assert!(addresses.has(PeerAddr::Tcp("[::ffff:10.0.0.1]:9".parse().unwrap())));
        let [first, second] = links;
        drop(first);
        assert!(addresses.has(at(3)));
        drop(second);
        assert!(!addresses.has(at(3)) && locked(&addresses.0).is_empty());
    }
}
