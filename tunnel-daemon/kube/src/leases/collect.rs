//! Deletes expired leases, and counts valid ones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use http::{Method, StatusCode};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, Preconditions};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::list::{Found, Reader};
use super::{EVERY, LEASE_SECONDS, LeaseEvents, LeaseScope, now};
use crate::access::Api;
use crate::request::send;

/// Leases deleted between two lists, one after the other: what is listed must not be old by then.
const DELETIONS_MAX: usize = 500;

/// Looks for expired leases every 15 s, the first time at once. `counts` gets the number of servers with valid leases; the
/// server `own` counts even before it has published its lease. Never ends.
pub async fn run(
    api: Arc<Api>,
    scope: LeaseScope,
    own: String,
    events: Arc<dyn LeaseEvents>,
    counts: watch::Sender<usize>,
) {
    let mut reader = Reader::new(Arc::clone(&events));
    let mut expired = Expired::default();
    let mut is_away = false;
    loop {
        let began = Instant::now();
        match reader.list(&api, &scope).await {
            Ok((leases, _version)) => {
                events.listed(200, "", began.elapsed());
                is_away = false;
                let now = now();
                let (valid, over): (Vec<_>, Vec<_>) =
                    leases.into_iter().partition(|lease| lease.is_valid(now));
                let servers = valid.into_iter().filter_map(|lease| lease.holder);
                let servers = servers.chain([own.clone()]);
                let servers = servers.collect::<BTreeSet<_>>().len();
                counts.send_if_modified(|count| std::mem::replace(count, servers) != servers);
                let gone = expired.unchanged(over, began, Instant::now());
                for lease in gone.iter().take(DELETIONS_MAX) {
                    delete(&api, &scope, lease, &*events).await;
                }
            }
            Err(error) => {
                // While the API server is away, no server can renew its lease.
                expired = Expired::default();
                let (status, reason) = error.code_and_reason();
                events.listed(status, reason, began.elapsed());
                // The last count stays in use.
                if !std::mem::replace(&mut is_away, true) {
                    tracing::error!(namespace = scope.namespace, api_server = api.address(), %error, "cannot list leases: expired leases are not deleted; retrying");
                }
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Leases that are over by the clock of this host, and since when their versions have been seen unchanged. A clock may be wrong:
/// a lease is deleted once it has not changed for its duration, as this process measures it.
#[derive(Default)]
struct Expired(BTreeMap<String, (Option<String>, Instant)>);

impl Expired {
    /// Of the leases `over` of a list, asked for at `asked` and read at `read`, those that may be deleted.
    fn unchanged(&mut self, over: Vec<Found>, asked: Instant, read: Instant) -> Vec<Found> {
        let mut known = std::mem::take(&mut self.0);
        let mut gone = Vec::new();
        for lease in over {
            let known = known.remove(&lease.name);
            let since = known
                .filter(|(version, _since)| *version == lease.version)
                .map_or(read, |(_version, since)| since);
            let kept = (lease.version.clone(), since);
            self.0.insert(lease.name.clone(), kept);
            if asked.saturating_duration_since(since) >= duration_of(&lease) {
                gone.push(lease);
            }
        }
        gone
    }
}

/// How long a lease holds without a renewal.
fn duration_of(lease: &Found) -> Duration {
    let seconds = lease.seconds.filter(|seconds| *seconds > 0);
    let seconds = seconds.unwrap_or(LEASE_SECONDS).unsigned_abs();
    Duration::from_secs(seconds.into())
}

async fn delete(api: &Api, scope: &LeaseScope, lease: &Found, events: &dyn LeaseEvents) {
    // Only this version: not a lease that was renewed meanwhile.
    let options = DeleteOptions {
        preconditions: Some(Preconditions {
            resource_version: lease.version.clone(),
            uid: None,
        }),
        ..DeleteOptions::default()
    };
    let name = &lease.name;
    let began = Instant::now();
    match send::<_, Value>(api, Method::DELETE, &scope.path_of(name), Some(&options)).await {
        Ok(_status) => {
            events.deleted(200, "", began.elapsed());
            tracing::info!(lease = name, "an expired lease is deleted");
        }
        Err(error) => {
            let (status, reason) = error.code_and_reason();
            events.deleted(status, reason, began.elapsed());
            // Another server was faster.
            if !matches!(
                error.status(),
                Some(StatusCode::NOT_FOUND | StatusCode::CONFLICT)
            ) {
                tracing::warn!(lease = name, %error, "cannot delete an expired lease");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(name: &str, version: &str, seconds: Option<i32>) -> Found {
        Found {
            name: name.to_owned(),
            version: Some(version.to_owned()),
            holder: None,
            end: None,
            seconds,
        }
    }

    /// As where the clock of this host is an hour ahead: to it, each lease of a living server is over.
    ///
    /// Limit (times): A lease that is over by the clock is deleted | once it was unchanged for its duration, as its deleter
    /// measures it
    #[test]
    fn a_renewed_lease_is_not_deleted_however_wrong_the_clock() {
        let (mut expired, zero) = (Expired::default(), Instant::now());
        let mut gone = |second: u64, over: Vec<Found>| {
            let at = zero + Duration::from_secs(second);
            let gone = expired.unchanged(over, at, at);
            gone.into_iter().map(|lease| lease.name).collect::<Vec<_>>()
        };
        for round in 0..20 {
            let over = vec![
                lease("alive", &round.to_string(), Some(30)),
                lease("dead", "1", Some(30)),
                lease("odd", "1", None),
                lease("negative", "1", Some(-5)),
                lease("long", "1", Some(200)),
            ];
            let expected: &[&str] = match round * 15 {
                0..30 => &[],
                30..200 => &["dead", "odd", "negative"],
                _ => &["dead", "odd", "negative", "long"],
            };
            assert_eq!(gone(round * 15, over), expected, "round {round}");
        }
    }
}
