//! Leases of servers (`coordination.k8s.io/v1`): a server publishes its own and deletes expired ones, an agent watches all
//! leases.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::{SignedDuration, Timestamp};

use crate::request::escape;

pub mod collect;
mod list;
pub mod publish;
pub mod watch;

/// Lease duration that upstream's servers write; they renew twice in that time.
const LEASE_SECONDS: i32 = 30;
/// Time between two renewals, and between two looks for expired leases.
const EVERY: Duration = Duration::from_secs(15);
/// Prefix of a lease's name; the server's id follows.
const NAME_PREFIX: &str = "konnectivity-proxy-server-";
/// Longest name of an object.
const NAME_BYTES_MAX: usize = 253;

/// Where leases are, and which ones count.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseScope {
    /// Namespace.
    pub namespace: String,
    /// Label selector, such as `k8s-app=konnectivity-server`.
    pub selector: String,
}

/// Counter of requests. `status` is the HTTP status, 0 without an answer; `reason` one word, empty for a success.
pub trait LeaseEvents: Send + Sync {
    /// Leases were listed, or could not be.
    fn listed(&self, status: u16, reason: &str, time: Duration);
    /// A watch began, or could not.
    fn watched(&self, status: u16, reason: &str);
    /// A lease could not be read, and was skipped: at each list and event.
    fn skipped(&self);
    /// An expired lease was deleted, or could not be.
    fn deleted(&self, status: u16, reason: &str, time: Duration);
}

impl LeaseScope {
    fn path(&self) -> String {
        let namespace = &self.namespace;
        format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases")
    }

    fn path_of(&self, name: &str) -> String {
        format!("{}/{name}", self.path())
    }

    /// With the selector, and further parameters of a query.
    fn query(&self, more: &str) -> String {
        let selector = escape(&self.selector);
        format!("{}?labelSelector={selector}{more}", self.path())
    }
}

/// The name of a server's lease.
#[must_use]
pub fn name_of(server_id: &str) -> String {
    format!("{NAME_PREFIX}{server_id}")
}

/// Whether a server's id can be part of its lease's name: a DNS subdomain (RFC 1123).
#[must_use]
pub fn is_valid_id(server_id: &str) -> bool {
    let name = name_of(server_id);
    let is_label = |label: &str| {
        let ends = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = label.as_bytes();
        ends(bytes.first())
            && ends(bytes.last())
            && bytes
                .iter()
                .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-')
    };
    name.len() <= NAME_BYTES_MAX && name.split('.').all(is_label)
}

/// Labels of `k=v,k=v`; blanks around are allowed.
///
/// # Errors
/// What is wrong, in upstream's words.
pub fn parse_labels(text: &str) -> Result<BTreeMap<String, String>, String> {
    if text.is_empty() {
        return Err("empty string provided".to_owned());
    }
    let pair = |pair: &str| match pair.trim().split('=').collect::<Vec<_>>()[..] {
        [key, value] => Ok((key.trim().to_owned(), value.trim().to_owned())),
        _ => Err(format!("invalid label format: {}", pair.trim())),
    };
    text.split(',').map(pair).collect()
}

/// Wall-clock time, by which leases end.
fn now() -> Timestamp {
    Timestamp::now()
}

/// When a lease ends: its duration after its renewal, else after its acquisition. `None`: a time or the duration is
/// missing, so the lease is over.
fn ends(lease: &Lease) -> Option<Timestamp> {
    let spec = lease.spec.as_ref()?;
    let since = spec.renew_time.as_ref().or(spec.acquire_time.as_ref())?;
    let duration = SignedDuration::from_secs(i64::from(spec.lease_duration_seconds?));
    since.0.checked_add(duration).ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::coordination::v1::LeaseSpec;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    /// Upstream (configuration): A lease is valid for its duration after its last renewal.
    #[test]
    fn a_lease_counts_for_its_duration_after_its_last_renewal() {
        let valid =
            |renewed: Option<i64>, acquired: Option<i64>, duration: Option<i32>, now: i64| {
                let time = |second: i64| MicroTime(at(second));
                let lease = Lease {
                    spec: Some(LeaseSpec {
                        renew_time: renewed.map(time),
                        acquire_time: acquired.map(time),
                        lease_duration_seconds: duration,
                        ..LeaseSpec::default()
                    }),
                    ..Lease::default()
                };
                list::Found::from(lease).is_valid(at(now))
            };
        assert!(valid(Some(100), Some(10), Some(30), 129));
        assert!(!valid(Some(100), None, Some(30), 130));
        assert!(valid(None, Some(100), Some(30), 129));
        assert!(!valid(None, None, Some(30), 0));
        // Upstream crashes on these leases.
        assert!(!valid(Some(100), None, None, 100));
        assert!(!valid(Some(100), None, Some(-1), 100));
        assert!(!list::Found::from(Lease::default()).is_valid(at(0)));
    }

    #[test]
    fn server_ids_must_be_valid_in_lease_names() {
        for id in ["a", "7f9c-1.example", "0123456789abcdef0123456789abcdef"] {
            assert!(is_valid_id(id), "{id}");
        }
        let long = "a".repeat(NAME_BYTES_MAX);
        for id in [
            "",
            "A",
            "a_b",
            "a-",
            "a..b",
            ".a",
            "a b",
            "\u{e9}",
            long.as_str(),
        ] {
            assert!(!is_valid_id(id), "{id}");
        }
    }

    /// Upstream (configuration): Lease labels are `key=value` pairs.
    #[test]
    fn labels_are_pairs() {
        let labels = parse_labels("a=b, k8s-app = konnectivity-server").unwrap();
        assert_eq!(labels.len(), 2);
        assert_eq!(labels["k8s-app"], "konnectivity-server");
        for (text, error) in [
            ("", "empty string provided"),
            ("a", "invalid label format: a"),
            ("a=b,c=d=e", "invalid label format: c=d=e"),
        ] {
            assert_eq!(parse_labels(text).unwrap_err(), error);
        }
    }

    #[test]
    fn a_selector_is_escaped_in_a_query() {
        let scope = LeaseScope {
            namespace: "n".to_owned(),
            selector: "a=b,c in (d)".to_owned(),
        };
        let path = "/apis/coordination.k8s.io/v1/namespaces/n/leases";
        assert_eq!(
            scope.query("&x=1"),
            format!("{path}?labelSelector=a%3Db%2Cc%20in%20%28d%29&x=1")
        );
    }
}
