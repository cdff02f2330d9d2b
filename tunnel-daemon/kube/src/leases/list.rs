//! The leases of a namespace, read page by page and lease by lease: one that cannot be read is skipped, and the others count.

use std::collections::BTreeSet;
use std::sync::Arc;

use http::StatusCode;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

use super::{LeaseEvents, LeaseScope, ends};
use crate::access::Api;
use crate::request::{PageMeta, RequestError, escape, excerpt, get_at_most};

/// Leases of a page. A lease has about a kilobyte.
const PAGE: usize = 500;
/// Longest answer with several leases.
const PAGE_BYTES_MAX: usize = 1 << 20;
/// Longest answer with one lease: the API server stores 1.5 MiB, of which JSON makes more.
const LEASE_BYTES_MAX: usize = 16 << 20;
/// Leases of one list. A user with write access to leases in the namespace can add any number.
const LISTED_MAX: usize = 20_000;
/// Attempts to read a list whose later pages expire.
const STARTS_MAX: usize = 3;
/// Unreadable leases that are named in the log; all are counted.
const NAMED_MAX: usize = 64;

/// What matters of a lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Found {
    pub(super) name: String,
    pub(super) version: Option<String>,
    pub(super) holder: Option<String>,
    /// `None`: a time or the duration is missing, so the lease is over.
    pub(super) end: Option<Timestamp>,
    pub(super) seconds: Option<i32>,
}

impl Found {
    /// Whether the lease has not ended.
    pub(super) fn is_valid(&self, now: Timestamp) -> bool {
        self.end.is_some_and(|end| end > now)
    }
}

impl From<Lease> for Found {
    fn from(lease: Lease) -> Self {
        Self {
            end: ends(&lease),
            seconds: lease
                .spec
                .as_ref()
                .and_then(|spec| spec.lease_duration_seconds),
            name: lease.metadata.name.unwrap_or_default(),
            version: lease.metadata.resource_version,
            holder: lease.spec.and_then(|spec| spec.holder_identity),
        }
    }
}

/// Reads leases one by one, and reports those that cannot be read.
pub(super) struct Reader {
    events: Arc<dyn LeaseEvents>,
    /// Names that were logged.
    named: BTreeSet<String>,
    /// Whether a list was longer than [`LISTED_MAX`].
    is_cut: bool,
}

impl Reader {
    pub(super) fn new(events: Arc<dyn LeaseEvents>) -> Self {
        Self {
            events,
            named: BTreeSet::new(),
            is_cut: false,
        }
    }

    /// A lease, unless it cannot be read.
    pub(super) fn read(&mut self, object: Value) -> Option<Found> {
        let name = name_of(&object);
        match serde_json::from_value::<Lease>(object) {
            Ok(lease) if !name.is_empty() => Some(lease.into()),
            Ok(_nameless) => self.skip("", "it has no name"),
            Err(error) => self.skip(&name, &error.to_string()),
        }
    }

    /// Counts a lease that cannot be read, and names it once.
    pub(super) fn skip(&mut self, name: &str, why: &str) -> Option<Found> {
        self.events.skipped();
        let name = excerpt(name);
        if self.named.len() < NAMED_MAX && !self.named.contains(&name) {
            let error = excerpt(why);
            tracing::warn!(
                lease = name,
                error,
                "a lease of a server cannot be read and is skipped; check who wrote it"
            );
            self.named.insert(name);
        }
        None
    }

    /// All leases, and the version of the list, from which a watch can go on.
    ///
    /// # Errors
    /// A page cannot be read, or pages expire again and again.
    pub(super) async fn list(
        &mut self,
        api: &Api,
        scope: &LeaseScope,
    ) -> Result<(Vec<Found>, String), RequestError> {
        let mut starts = 1;
        loop {
            match self.list_once(api, scope).await {
                // The API server keeps the state of a list for minutes; a slow reader begins again.
                Err(error) if error.status() == Some(StatusCode::GONE) && starts < STARTS_MAX => {
                    starts += 1;
                }
                listed => return listed,
            }
        }
    }

    async fn list_once(
        &mut self,
        api: &Api,
        scope: &LeaseScope,
    ) -> Result<(Vec<Found>, String), RequestError> {
        let (mut found, mut limit, mut next) = (Vec::new(), PAGE, String::new());
        loop {
            let bytes_max = if limit == 1 {
                LEASE_BYTES_MAX
            } else {
                PAGE_BYTES_MAX
            };
            let query = scope.query(&format!("&limit={limit}{next}"));
            let page: Page = match get_at_most(bytes_max, api, &query).await {
                Err(RequestError::TooLong(_)) if limit > 1 => {
                    limit = (limit / 10).max(1);
                    continue;
                }
                page => page?,
            };
            let items = page.items.unwrap_or_default();
            found.extend(items.into_iter().filter_map(|item| self.read(item)));
            let rest = page.metadata.rest.filter(|rest| !rest.is_empty());
            let is_cut = found.len() >= LISTED_MAX && rest.is_some();
            if is_cut && !std::mem::replace(&mut self.is_cut, true) {
                tracing::warn!(
                    "there are more than {LISTED_MAX} leases of servers: the others are passed over; check who writes \
                     leases with this label"
                );
            }
            match rest {
                Some(rest) if !is_cut => next = format!("&continue={}", escape(&rest)),
                _ => return Ok((found, page.metadata.version.unwrap_or_default())),
            }
        }
    }
}

/// The name of an object, empty without one.
pub(super) fn name_of(object: &Value) -> String {
    let name = object.pointer("/metadata/name").and_then(Value::as_str);
    name.unwrap_or_default().to_owned()
}

/// One page of a list, its items unread.
#[derive(Deserialize)]
struct Page {
    #[serde(default)]
    metadata: PageMeta,
    items: Option<Vec<Value>>,
}
