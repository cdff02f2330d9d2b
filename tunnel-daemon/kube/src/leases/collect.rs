//! Deletes expired leases, and counts valid ones.

use std::collections::BTreeSet;
use std::sync::Arc;

use http::{Method, StatusCode};
use k8s_openapi::List;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, Preconditions};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::{EVERY, LeaseEvents, LeaseScope, is_valid, now};
use crate::access::Api;
use crate::request::send;

/// Looks for expired leases every 15 s, the first time at once. `counts` gets the number of servers with valid leases; the
/// server `own` counts even before it has published its lease. Never ends.
pub async fn run(
    api: Arc<Api>,
    scope: LeaseScope,
    own: String,
    events: Arc<dyn LeaseEvents>,
    counts: watch::Sender<usize>,
) {
    let mut is_away = false;
    loop {
        let began = Instant::now();
        let listed = send::<(), List<Lease>>(&api, Method::GET, &scope.query(""), None).await;
        match listed {
            Ok(list) => {
                events.listed(200, "", began.elapsed());
                is_away = false;
                let now = now();
                let (valid, expired): (Vec<_>, Vec<_>) =
                    list.items.iter().partition(|lease| is_valid(lease, now));
                let holder = |lease: &&Lease| lease.spec.as_ref()?.holder_identity.clone();
                let servers = valid.iter().filter_map(holder).chain([own.clone()]);
                let servers = servers.collect::<BTreeSet<_>>().len();
                counts.send_if_modified(|count| std::mem::replace(count, servers) != servers);
                for lease in expired {
                    delete(&api, &scope, lease, &*events).await;
                }
            }
            Err(error) => {
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

async fn delete(api: &Api, scope: &LeaseScope, lease: &Lease, events: &dyn LeaseEvents) {
    let Some(name) = &lease.metadata.name else {
        return;
    };
    // Only this version: not a lease that was renewed meanwhile.
    let options = DeleteOptions {
        preconditions: Some(Preconditions {
            resource_version: lease.metadata.resource_version.clone(),
            uid: None,
        }),
        ..DeleteOptions::default()
    };
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
